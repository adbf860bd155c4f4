"""What is in a batch, in which order, and how it resumes."""

import gc
import hashlib
import json
import threading

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from attnres_jax.data import packing
from attnres_jax.data.token_store import Tokens
from attnres_jax.errors import UserError

KEYS = {"tokens", "targets", "positions", "segment_ids", "mask"}


def same(a, b):
  return all(
    x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x)
    for x, y in zip(a, b, strict=True)
  )


def oracle_windows(documents, order, seq_len):
  """Every window of a stream, token by token.

  Args:
    documents: lists of ids, eos at both ends.
    order: which document comes when.
  """
  stream = [(token, number) for number in order for token in documents[number]]
  for begin in range(0, len(stream) - 1, seq_len):
    window = {key: [] for key in KEYS}
    position, segment, previous = 0, 0, None
    for i in range(begin, begin + seq_len):
      token, document = stream[i] if i < len(stream) else (0, None)
      target, its_document = stream[i + 1] if i + 1 < len(stream) else (0, None)
      if document is not None and document != previous:
        position, segment, previous = 0, segment + 1, document
      window["tokens"].append(token)
      window["targets"].append(target)
      window["positions"].append(position if document is not None else 0)
      window["segment_ids"].append(segment if document is not None else 0)
      window["mask"].append(
        int(document is not None and document == its_document)
      )
      position += 1
    yield {key: np.array(window[key]) for key in KEYS}


def oracle_epoch(documents, seq_len, seed, epoch):
  rng = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
  order = rng.permutation(len(documents))
  windows = list(oracle_windows(documents, order, seq_len))
  full = (sum(map(len, documents)) - 1) // seq_len
  return [windows[k] for k in rng.permutation(full)]


def is_training(text, val_percent):
  doc_id = hashlib.sha256(text.encode()).hexdigest()
  digest = hashlib.sha256(doc_id.encode()).hexdigest()
  return int(digest, 16) % 10_000 >= 100 * val_percent


@pytest.fixture(scope="module")
def documents():
  rng = np.random.default_rng(0)
  lengths = [2, 3, 90, 1, 4, *rng.integers(1, 60, 30)]
  return [[0, *rng.integers(1, 999, n), 0] for n in lengths]


@pytest.fixture(scope="module")
def tokens(documents):
  offsets = np.cumsum([0, *map(len, documents)])
  return Tokens(np.concatenate(documents).astype(np.uint16), offsets)


@pytest.mark.fast
@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 64])
def test_windows_against_the_oracle(documents, tokens, seq_len):
  windows = packing.TrainWindows(tokens, seq_len, seed=3)
  index = 0
  for epoch in range(3):
    for expected in oracle_epoch(documents, seq_len, 3, epoch):
      got = windows[index]
      assert got.keys() == KEYS
      for key in KEYS:
        assert got[key].dtype == np.int32
        np.testing.assert_array_equal(got[key], expected[key], key)
      index += 1
    assert index == (epoch + 1) * windows.per_epoch


@pytest.mark.fast
@pytest.mark.parametrize("count", [1, 5, 10_000])
def test_eval_windows_against_the_oracle(documents, tokens, count):
  order = np.arange(len(documents))[::-1]
  expected = list(oracle_windows(documents, order, 16))
  got = packing.eval_windows(tokens, order, 16, count)
  picked = range(len(expected)) if count > len(expected) else None
  assert len(got) == min(count, len(expected))
  for i, window in enumerate(got):
    k = picked[i] if picked else i * len(expected) // count
    for key in KEYS:
      np.testing.assert_array_equal(window[key], expected[k][key], key)


def test_batches_are_the_packed_documents(load, jsonl, texts, take):
  dataset = load(path=jsonl, seq_len=24, batch_size=4)
  tokenizer = dataset.tokenizer
  facts = dataset.describe()
  per_epoch = (facts["train_tokens"] - 1) // 24
  docs = [
    [tokenizer.eos_id, *tokenizer.encode(t), tokenizer.eos_id]
    for t in texts
    if is_training(t, 20)
  ]
  assert len(docs) == facts["train_documents"]
  epochs = oracle_epoch(docs, 24, 0, 0) + oracle_epoch(docs, 24, 0, 1)
  n = len(epochs) // 4
  assert n * 4 > per_epoch + 4  # well into the second epoch
  for i, batch in enumerate(take(dataset, n)[0]):
    assert batch.keys() == KEYS
    for key in KEYS:
      assert batch[key].dtype == np.int32
      rows = np.stack([w[key] for w in epochs[4 * i : 4 * i + 4]])
      np.testing.assert_array_equal(batch[key], rows, key)


def test_seeds(load, jsonl, take):
  first, _ = take(load(path=jsonl), 20)
  again, _ = take(load(path=jsonl), 20)
  other, _ = take(load(path=jsonl, seed=1), 20)
  negative, _ = take(load(path=jsonl, seed=-1), 20)
  assert same(first, again)
  assert not same(first, other)
  assert not same(first, negative)
  # The validation set is not the seed's to choose.
  assert same(
    load(path=jsonl).eval_batches(), load(path=jsonl, seed=1).eval_batches()
  )


@pytest.mark.parametrize("prefetch", [1, 5])
def test_resume(load, jsonl, take, prefetch):
  dataset = load(path=jsonl, prefetch=prefetch)
  epoch = (dataset.describe()["train_tokens"] - 1) // 32 / 4
  total = int(3 * epoch)
  batches, _ = take(dataset, total)
  assert not same(batches[:5], batches[int(epoch) : int(epoch) + 5])
  for n in [0, 1, int(epoch) - 1, int(epoch), int(epoch) + 1, total - 1]:
    head, state = take(dataset, n)
    assert same(head, batches[:n])
    # A new Dataset, as after a restart.
    tail, _ = take(load(path=jsonl, prefetch=3), total - n, state)
    assert same(tail, batches[n:]), n


def test_state_is_small_and_does_not_change_later(load, jsonl):
  iterator = load(path=jsonl).train_iterator()
  next(iterator)
  state = iterator.get_state()
  text = json.dumps(state)
  assert len(text) < 500
  second = next(iterator)
  assert json.dumps(state) == text
  next(iterator)
  iterator.set_state(state)  # rewind one that is running
  assert same([next(iterator)], [second])
  iterator.close()


def test_resume_through_orbax(load, jsonl, take, tmp_path):
  batches, _ = take(load(path=jsonl), 6)
  iterator = load(path=jsonl).train_iterator()
  assert same([next(iterator) for _ in range(3)], batches[:3])
  ocp.save_checkpointables(tmp_path / "ckpt", {"data": iterator})
  iterator.close()
  other = load(path=jsonl).train_iterator()
  ocp.load_checkpointables(tmp_path / "ckpt", {"data": other})
  assert same([next(other) for _ in range(3)], batches[3:])
  other.close()
  wrong = load(path=jsonl, seq_len=16).train_iterator()
  ocp.load_checkpointables(tmp_path / "ckpt", {"data": wrong})
  with pytest.raises(UserError, match="seq_len was 32"):
    next(wrong)
  with pytest.raises(UserError, match="seq_len was 32"):
    wrong.get_state()
  wrong.close()
  # As if two processes had written it: the position is that of all together.
  (file,) = (tmp_path / "ckpt" / "data").glob("process_*.json")
  for name in ("process_0-of-2.json", "process_1-of-2.json"):
    (file.parent / name).write_bytes(file.read_bytes())
  file.unlink()
  other = load(path=jsonl).train_iterator()
  ocp.load_checkpointables(tmp_path / "ckpt", {"data": other})
  assert same([next(other) for _ in range(3)], batches[3:])
  other.close()


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(seq_len=16), r"seq_len was 32 .* is 16 .*--config.data.seq_len"),
    (
      dict(batch_size=8),
      r"batch_size was 4 .* is 8 .*--config.data.batch_size",
    ),
    (dict(seed=1), r"seed was 0 .* is 1 .*--config.run.seed"),
    (dict(val_percent=30), r"fingerprint was .*--config.data"),
    (dict(vocab_size=290), r"fingerprint was .*--config.data"),
  ],
)
def test_state_of_other_data_is_refused(load, jsonl, take, change, message):
  _, state = take(load(path=jsonl), 2)
  with pytest.raises(UserError, match=message) as error:
    take(load(path=jsonl, **change), 1, state)
  assert "\n" not in str(error.value)


def test_changed_text_is_refused(load, texts, take, tmp_path):
  path = tmp_path / "corpus.jsonl"
  rows = [json.dumps({"text": text}) + "\n" for text in texts]
  path.write_text("".join(rows))
  _, state = take(load(path=path), 2)
  path.write_text("".join(rows).replace("depth", "width", 1))
  with pytest.raises(UserError, match="fingerprint"):
    take(load(path=path), 1, state)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_batches(load, jsonl, take, count):
  whole, _ = take(load(path=jsonl, batch_size=8), 30)
  parts = [
    take(
      load(path=jsonl, batch_size=8, process_index=p, process_count=count), 30
    )
    for p in range(count)
  ]
  for step, batch in enumerate(whole):
    rows = [part[0][step]["tokens"] for part in parts]
    assert all(len(r) == 8 // count for r in rows)
    np.testing.assert_array_equal(np.concatenate(rows), batch["tokens"])
  evals = [
    load(
      path=jsonl, batch_size=8, process_index=p, process_count=count
    ).eval_batches()
    for p in range(count)
  ]
  for step, batch in enumerate(load(path=jsonl, batch_size=8).eval_batches()):
    together = np.concatenate([e[step]["tokens"] for e in evals])
    np.testing.assert_array_equal(together, batch["tokens"])


def test_rows_of_a_mesh_in_another_order(load, jsonl, take):
  """Devices of a process need not be neighbours: it says which rows it has."""
  whole, _ = take(load(path=jsonl, batch_size=8), 5)
  rows = (0, 1, 4, 5)
  part = load(path=jsonl, batch_size=8, process_count=2, rows=rows)
  for expected, batch in zip(whole, take(part, 5)[0], strict=True):
    for key in KEYS:
      np.testing.assert_array_equal(batch[key], expected[key][list(rows)], key)


def test_another_number_of_processes_continues_the_data(load, jsonl, take):
  whole, _ = take(load(path=jsonl, batch_size=8), 7)
  _, state = take(load(path=jsonl, batch_size=8, process_count=2), 3)
  for count in (1, 4):
    parts = [
      take(
        load(path=jsonl, batch_size=8, process_index=p, process_count=count),
        4, state,
      )[0]
      for p in range(count)
    ]  # fmt: skip
    for step, batch in enumerate(whole[3:]):
      rows = np.concatenate([part[step]["tokens"] for part in parts])
      np.testing.assert_array_equal(rows, batch["tokens"])


def test_eval_batches_have_one_shape(load, jsonl):
  dataset = load(path=jsonl, eval_sequences=6)
  batches = dataset.eval_batches()
  assert [b["tokens"].shape for b in batches] == [(4, 32)] * 2
  assert (batches[1]["mask"][:2].sum(1) > 0).all()
  for key in KEYS:
    assert (batches[1][key][2:] == 0).all()
  assert "note" not in dataset.describe()
  assert same(batches, dataset.eval_batches())


def test_fewer_eval_sequences_than_asked_for(load, jsonl):
  dataset = load(path=jsonl, eval_sequences=10_000)
  facts = dataset.describe()
  available = facts["eval_sequences"]
  assert 0 < available < 10_000
  assert str(available) in facts["note"]
  assert len(dataset.eval_batches()) == -(-available // 4)


def loader_threads():
  return [t for t in threading.enumerate() if "prefetch" in t.name]


def test_no_thread_stays(load, jsonl):
  iterator = load(path=jsonl).train_iterator()
  next(iterator)
  assert len(loader_threads()) == 1
  iterator.close()
  assert not loader_threads()
  iterator.close()
  with pytest.raises(ValueError, match="closed"):
    next(iterator)
  forgotten = load(path=jsonl).train_iterator()
  next(forgotten)
  del forgotten
  gc.collect()
  assert not loader_threads()


def test_nothing_is_said_at_exit(jsonl, cache, run_python):
  """Neither after `close` nor for an iterator that was never closed."""
  code = f"""
from attnres_jax import data
from configs import train
config = train.get_config("size=micro,data=files").data
config.update(dict(path={str(jsonl)!r}, val_percent=20, vocab_size=300))
closed, left = (data.load(config, 0).train_iterator() for _ in range(2))
next(closed), next(left)
closed.close()
import os
os.dup2(1, 2)
"""
  assert run_python(code, devices=1) == ""
