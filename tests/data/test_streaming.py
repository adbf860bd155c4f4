"""Hugging Face datasets, from local files."""

import json

import numpy as np
import pytest

from attnres_jax.errors import UserError
from tests.data.test_batches import is_training, same


@pytest.fixture(scope="module")
def datasets():
  return pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
  """The documents in four shards."""
  path = tmp_path_factory.mktemp("dataset")
  for shard in range(4):
    rows = [json.dumps({"text": t}) + "\n" for t in texts[shard::4]]
    (path / f"part-{shard}.jsonl").write_text("".join(rows))
  return path


@pytest.fixture
def stream(datasets, folder, load):
  def stream(**kwargs):
    return load("hf", **{"path": folder, **kwargs})

  return stream


def oracle(dataset, texts, seq_len, count):
  """Tokens of the first windows of the training stream, unshuffled."""
  tokenizer = dataset.tokenizer
  ids = []
  while len(ids) <= seq_len * count:
    for shard in range(4):
      for text in texts[shard::4]:
        if is_training(text, 20):
          eos = tokenizer.eos_id
          ids += [eos, *tokenizer.encode(text), eos]
  return [ids[i * seq_len : (i + 1) * seq_len + 1] for i in range(count)]


def test_windows_are_those_of_the_stream(stream, texts, take):
  dataset = stream(seq_len=16)
  # Two shuffle groups of 64 batches; more than an epoch of 4,000 tokens.
  batches, _ = take(dataset, 128)
  windows = oracle(dataset, texts, 16, 512)
  for group in (0, 1):
    part = batches[64 * group : 64 * (group + 1)]
    inputs = [tuple(row) for b in part for row in b["tokens"]]
    targets = [tuple(row) for b in part for row in b["targets"]]
    expected = windows[256 * group : 256 * (group + 1)]
    assert sorted(inputs) == sorted(tuple(w[:-1]) for w in expected)
    assert sorted(targets) == sorted(tuple(w[1:]) for w in expected)
    assert inputs != [tuple(w[:-1]) for w in expected]


def test_resume(stream, take):
  batches, _ = take(stream(seq_len=16), 160)
  again, _ = take(stream(seq_len=16), 160)
  assert same(batches, again)
  other, _ = take(stream(seq_len=16, seed=1), 160)
  assert not same(batches, other)
  for n in (1, 63, 64, 65, 100, 128, 150):
    head, state = take(stream(seq_len=16), n)
    tail, _ = take(stream(seq_len=16), 160 - n, state)
    assert same(head + tail, batches), n


def test_sides(stream, texts, take):
  dataset = stream(seq_len=64, eval_sequences=10_000)
  bytes_of = dataset.tokenizer.token_bytes
  held_out = [t for t in texts if not is_training(t, 20)]
  counted = sum(
    (bytes_of[b["targets"]] * b["mask"]).sum(dtype=float)
    for b in dataset.eval_batches()
  )
  assert counted == sum(len(t.encode()) for t in held_out)
  assert dataset.describe()["val_documents"] == len(held_out)
  # Row by row, several epochs: a marker may be cut in one of them.
  rows = [row for b in take(dataset, 200)[0] for row in b["tokens"]]
  shown = "|".join(map(dataset.tokenizer.decode, rows))
  for text in texts:
    assert (text[:11] in shown) == is_training(text, 20)


def test_processes_read_different_documents(stream, texts, take):
  seen = []
  for process in range(2):
    dataset = stream(
      seq_len=16, process_index=process, process_count=2, batch_size=4
    )
    batches, state = take(dataset, 128)
    assert batches[0]["tokens"].shape == (2, 16)
    shown = dataset.tokenizer.decode(
      np.concatenate([b["tokens"].reshape(-1) for b in batches])
    )
    seen.append({t[:11] for t in texts if t[:11] in shown})
    with pytest.raises(UserError, match="process_count was 2"):
      take(stream(seq_len=16), 1, state)
  assert seen[0] and seen[1] and not seen[0] & seen[1]


def test_saved_datasets_and_parquet(datasets, stream, texts, take, tmp_path):
  saved = datasets.Dataset.from_dict({"text": texts})
  saved.save_to_disk(tmp_path / "a")
  datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "b")
  (tmp_path / "c").mkdir()
  saved.to_parquet(tmp_path / "c" / "data.parquet")
  a, b, c = (take(stream(path=tmp_path / f), 3)[0] for f in "abc")
  assert same(a, b)
  assert same(a, c)


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(path=""), "got no data.path"),
    (dict(path="no-such-dataset"), "cannot stream the dataset 'no-such"),
    (dict(hf_split="nope"), "cannot stream the dataset .*hf_split"),
    (dict(text_key="txt"), "got the columns text, expected 'txt'"),
  ],
)
def test_errors(stream, change, message):
  with pytest.raises(UserError, match=message) as error:
    stream(**change)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("percent, got", [(1, "none"), (99, "all")])
def test_empty_sides(stream, texts, tmp_path, percent, got):
  one_side = [t for t in texts if is_training(t, percent) == (percent == 1)]
  rows = [json.dumps({"text": t}) + "\n" for t in one_side]
  (tmp_path / "a.jsonl").write_text("".join(rows))
  with pytest.raises(UserError, match=f"holds out {got} of the"):
    stream(path=tmp_path, val_percent=percent)
