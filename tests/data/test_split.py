"""No text is on both sides, whatever the source."""

import json

import numpy as np
import pytest

from attnres_jax.data import corpora, documents, token_store
from attnres_jax.data.documents import Document

GRAM = 24  # tokens; two texts that share so many in a row share a passage


def leaked(dataset, batches):
  """The share of validation passages that stand in training batches."""
  # As bytes, because finding bytes is quick.
  train = b"".join(b["tokens"].astype(np.uint16).tobytes() for b in batches)
  runs = [
    row[begin : begin + GRAM].astype(np.uint16).tobytes()
    for batch in dataset.eval_batches()
    for row, mask in zip(batch["tokens"], batch["mask"], strict=True)
    for begin in range(0, len(row) - GRAM, GRAM)
    if mask[begin : begin + GRAM].all()
  ]
  runs = runs[:: max(1, len(runs) // 500)]
  return np.mean([run in train for run in runs])


def an_epoch(dataset, take):
  facts = dataset.describe()
  size = facts["seq_len"] * 4
  return take(dataset, -(-facts["train_tokens"] // size))[0]


@pytest.mark.parametrize("broken", [False, True])
def test_sotu(load, take, monkeypatch, broken):
  """Presidents quote: of validation sentences 1.2 % stand in other speeches."""
  settings = dict(source="sotu", seq_len=512, eval_sequences=10_000)
  if broken:
    # One of the 15 documents is training data as well, under another name.
    every = list(corpora.sotu().documents())
    read = [d for d in every if documents.is_held_out(d.id, 5)]
    assert len(read) == 15
    (doc,) = (d for d in read if d.id == "1997_william_j_clinton_d")
    read.append(Document("1790_copy", doc.text + "."))
    assert not documents.is_held_out("1790_copy", 5)
    corpus = corpora.Corpus("sotu", "broken", 1, lambda: iter(read))
    monkeypatch.setattr(corpora, "sotu", lambda: corpus)
  dataset = load(**settings)
  assert (leaked(dataset, an_epoch(dataset, take)) > 0.02) == broken


@pytest.mark.parametrize("broken", [False, True])
def test_files(load, jsonl, take, monkeypatch, broken):
  if broken:
    # Held out, yet written to the training side.
    split = documents.split

    def leaky(*args):
      for doc, held_out in split(*args):
        yield doc, held_out
        if held_out:
          yield doc, False

    monkeypatch.setattr(token_store, "split", leaky)
    monkeypatch.setattr(token_store, "VERSION", -1)  # another cache entry
  dataset = load(path=jsonl, seq_len=64, eval_sequences=10_000)
  share = leaked(dataset, an_epoch(dataset, take))
  assert (share > 0.5) == broken


def test_same_text_twice_is_kept_once(load, tmp_path, texts):
  path = tmp_path / "twice.jsonl"
  rows = [json.dumps({"text": text}) + "\n" for text in texts]
  path.write_text("".join(rows + rows[:30]))
  facts = load(path=path).describe()
  assert facts["train_documents"] + facts["val_documents"] == len(texts)


@pytest.mark.fast
def test_same_text_under_two_names_is_on_one_side():
  names = [f"name-{i}" for i in range(100)]
  sides = list(
    documents.split(
      [
        *(Document(n, "same") for n in names),
        Document("a", "train", False),
        Document("b", "val", True),
      ],
      50,
      "c",
    )
  )
  assert [d.text for d, _ in sides] == ["same", "train", "val"]


@pytest.mark.fast
def test_larger_shares_hold_out_supersets():
  names = [f"name-{i}" for i in range(2000)]
  shares = (1, 5, 20, 50, 99)
  held = [{n for n in names if documents.is_held_out(n, s)} for s in shares]
  for share, smaller, larger in zip(shares, held, held[1:], strict=False):
    assert smaller < larger
    assert abs(len(smaller) / 20 - share) < 3


def test_bytes_of_every_text_are_counted_once(load, jsonl, texts):
  """What the denominator of bits per byte rests on."""
  dataset = load(path=jsonl, eval_sequences=10_000)
  facts = dataset.describe()
  bytes_of = dataset.tokenizer.token_bytes
  counted = sum(
    (bytes_of[b["targets"]] * b["mask"]).sum(dtype=float)
    for b in dataset.eval_batches()
  )
  assert counted == facts["val_bytes"]
  total = sum(len(text.encode()) for text in texts)
  assert facts["val_bytes"] + facts["train_bytes"] == total
  assert facts["token_bytes_exact"]


def test_cache_is_made_once_and_mended(load, jsonl, cache, take):
  batches, _ = take(load(path=jsonl, vocab_size=310), 3)
  newest = max((cache / "tokens").iterdir(), key=lambda p: p.stat().st_mtime_ns)
  before = (newest / "train.bin").stat().st_mtime_ns
  load(path=jsonl, vocab_size=310)
  assert (newest / "train.bin").stat().st_mtime_ns == before
  (newest / "val.bin").write_bytes(b"1")
  again, _ = take(load(path=jsonl, vocab_size=310), 3)
  assert (newest / "train.bin").stat().st_mtime_ns > before
  for a, b in zip(batches, again, strict=True):
    np.testing.assert_array_equal(a["tokens"], b["tokens"])
  assert not [p for p in (cache / "tokens").iterdir() if p.name[0] == "."]
