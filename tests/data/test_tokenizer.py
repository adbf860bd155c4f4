"""Tokenizers: the shipped one, training, bytes per token."""

import json
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from attnres_jax.data import corpora, dataset
from attnres_jax.data import tokenizer as tokenizer_lib
from attnres_jax.data.documents import Document, is_held_out
from attnres_jax.errors import UserError
from scripts import build_sotu

TRICKY = [
  "plain text",
  "  leading, trailing  ",
  "naïve Überraschung 😀👩‍👩‍👧 日本語\r\n\ttabs",
  "quotes <|endoftext|> in a document",
  "\u0000\u00a0\ufeff",
  "x",
]


@pytest.fixture(scope="module")
def shipped():
  return tokenizer_lib.load(str(dataset.SHIPPED_TOKENIZER))


@pytest.mark.fast
@pytest.mark.parametrize("text", TRICKY)
def test_shipped_round_trip_and_bytes(shipped, text):
  ids = shipped.encode(text)
  assert shipped.decode(ids) == text
  assert shipped.eos_id not in ids
  assert shipped.encode_batch([text, "and another"])[0] == ids
  # Tokens may end inside a character; together they are all of its bytes.
  assert shipped.token_bytes[ids].sum() == len(text.encode())


@pytest.mark.fast
def test_shipped_facts(shipped):
  assert shipped.vocab_size == dataset.SHIPPED_VOCAB == 2048
  assert shipped.token_bytes.shape == (2048,)
  assert shipped.token_bytes.dtype == np.float32
  assert shipped.token_bytes[shipped.eos_id] == 0
  assert np.delete(shipped.token_bytes, shipped.eos_id).min() == 1
  assert shipped.decode([shipped.eos_id]) == "<|endoftext|>"


def test_shipped_one_can_be_built_again(shipped):
  """From the training documents alone, without those held out."""
  docs = list(corpora.sotu().documents())
  assert len(docs) == 233
  built = build_sotu.build_tokenizer(docs)
  assert built.sha256 == shipped.sha256
  texts = set(dataset.train_texts(docs, 5, "sotu", 0))
  assert texts == {d.text for d in docs if not is_held_out(d.id, 5)}


def test_packing_is_reproducible(tmp_path):
  docs = list(corpora.sotu().documents())[::-1]
  (tmp_path / "data").mkdir()
  for doc in docs[:20]:
    row = {"year": 0, "name": "", "party": "", "text": doc.text}
    (tmp_path / "data" / f"{doc.id}.json").write_text(json.dumps(row))
  read = build_sotu.read_package(tmp_path)
  assert read == docs[:20][::-1]
  assert build_sotu.pack(read) == build_sotu.pack(read)


@pytest.mark.fast
def test_training_twice_gives_the_same_bytes(texts, tmp_path):
  for name in "ab":
    tokenizer_lib.train(texts, 320).save(tmp_path / name)
  assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
  assert tokenizer_lib.load(str(tmp_path / "a")).vocab_size == 320


def test_second_load_is_quick(load):
  first = load("sotu")
  begin = time.perf_counter()
  second = load("sotu")
  assert time.perf_counter() - begin < 1
  assert first.describe() == second.describe()
  assert first.describe()["train_documents"] == 218
  assert first.describe()["val_documents"] == 15


def test_shipped_tokenizer_is_not_used_where_it_has_seen_too_much(
  load, texts, monkeypatch
):
  read = [Document(str(i), text) for i, text in enumerate(texts)]
  corpus = corpora.Corpus("sotu", "small", 1, lambda: iter(read))
  monkeypatch.setattr(corpora, "sotu", lambda: corpus)
  shipped = tokenizer_lib.load(str(dataset.SHIPPED_TOKENIZER))
  assert load("sotu", val_percent=5).tokenizer.sha256 == shipped.sha256
  assert load("sotu", val_percent=10).tokenizer.sha256 != shipped.sha256


@pytest.mark.fast
def test_large_corpora_are_sampled(monkeypatch, texts):
  monkeypatch.setattr(dataset, "TOKENIZER_BYTES", 5000)
  docs = [Document(str(i), f"{i} {text}") for i, text in enumerate(texts * 50)]
  size = sum(len(d.text) for d in docs)
  picked = list(dataset.train_texts(docs, 20, "c", size))
  assert 3000 < sum(map(len, picked)) <= 5000
  numbers = [int(text.split()[0]) for text in picked]
  assert max(numbers) > 1500  # from all over, not only the beginning
  assert not [n for n in numbers if is_held_out(str(n), 20)]


def test_own_tokenizer(load, jsonl, texts, tmp_path):
  path = tmp_path / "own.json"
  trained = tokenizer_lib.train(texts, 280)
  trained.save(path)
  found = load(path=jsonl, tokenizer=str(path), vocab_size=280)
  assert found.tokenizer.sha256 == trained.sha256
  # More rows than ids are no harm.
  assert load(path=jsonl, tokenizer=str(path), vocab_size=400)
  with pytest.raises(UserError, match=r"280 .* 279.*data.vocab_size") as error:
    load(path=jsonl, tokenizer=str(path), vocab_size=279)
  assert "own.json" in str(error.value)


def test_vocabulary_beyond_16_bits(load, jsonl, take, tmp_path):
  """Ids above 65535 survive the cache."""
  inner = tokenizers.Tokenizer.from_file(str(dataset.SHIPPED_TOKENIZER))
  spec = json.loads(inner.to_str())
  vocab = spec["model"]["vocab"]
  spec["model"]["vocab"] = {t: i + 70_000 * (i > 0) for t, i in vocab.items()}
  path = tmp_path / "large.json"
  path.write_text(json.dumps(spec))
  dataset_ = load(path=jsonl, tokenizer=str(path), vocab_size=80_000)
  tokens = take(dataset_, 1)[0][0]["tokens"]
  assert tokens.max() > 70_000
  assert "document-" in dataset_.tokenizer.decode(tokens.reshape(-1))


@pytest.mark.fast
def test_bytes_of_a_sentencepiece_like_tokenizer():
  vocab = {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "▁deep": 3, "é": 4, "▁": 5}
  inner = tokenizers.Tokenizer(
    models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
  )
  inner.pre_tokenizer = pre_tokenizers.Metaspace()
  inner.decoder = decoders.Metaspace()
  inner.add_special_tokens(["<unk>", "</s>"])
  tokenizer = tokenizer_lib.Tokenizer(inner, "t")
  assert tokenizer.eos_id == 1
  assert tokenizer.token_bytes.tolist() == [0, 0, 1, 5, 2, 1]
