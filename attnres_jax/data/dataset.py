"""`load`: from config.data to batches."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import grain
from absl import logging

from attnres_jax.data import corpora, packing, pipeline, token_store
from attnres_jax.data import tokenizer as tokenizer_lib
from attnres_jax.data.corpora import Corpus
from attnres_jax.data.documents import Document, rank, split
from attnres_jax.data.packing import Batch
from attnres_jax.data.tokenizer import Tokenizer
from attnres_jax.errors import UserError, unknown_name

SOURCES = ("sotu", "pycode", "files", "hf")
SHIPPED_TOKENIZER = corpora.ASSETS / "sotu_tokenizer.json"
SHIPPED_VOCAB = 2048
# The shipped tokenizer has not seen what this share holds out, nor what any
# smaller one does.
SHIPPED_VAL_PERCENT = 5
# More text than this makes a tokenizer no better, only slower to train.
TOKENIZER_BYTES = 32_000_000


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Training batches forever and a fixed validation set.

  A batch is a dict of int32 [rows, T] arrays, this process's rows of it:
  tokens, targets, positions, segment_ids and mask; see `packing.Stream`.
  Bits per byte of a model = sum(nll * mask) / ln 2 / sum(bytes * mask), where
  bytes = tokenizer.token_bytes[targets].

  Attributes:
    tokenizer: ids are below `tokenizer.vocab_size` <= config.data.vocab_size.
  """

  tokenizer: Tokenizer
  _train: Callable[[], grain.IterDataset]
  _eval_windows: Callable[[], list[Batch]]
  _identity: dict
  _rows: Sequence[int]
  _prefetch: int
  _facts: dict

  def train_iterator(self) -> pipeline.TrainIterator:
    """A new iterator from the beginning; `close` it after use."""
    return pipeline.prefetched(
      self._train(), self._prefetch, dict(self._identity)
    )

  def eval_batches(self) -> list[Batch]:
    """The validation set, the same at every call and for every seed.

    The last batch is filled up with rows whose mask is 0, so that all have the
    same shape on all processes.
    """
    windows = self._eval_windows()
    size = self._identity["batch_size"]
    mine = list(self._rows)
    batches = []
    for begin in range(0, len(windows), size):
      batch = packing.stack(windows[begin : begin + size], size)
      batches.append({key: rows[mine] for key, rows in batch.items()})
    return batches

  def describe(self) -> dict:
    """Facts for logs: source, documents, bytes, tokens, vocabulary, ..."""
    return dict(self._facts)


def load(
  config,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
  rows: Sequence[int] | None = None,
) -> Dataset:
  """Opens a corpus; the first time, it is tokenised into the cache.

  Args:
    config: the group `data` of configs/train.py.
    seed: order of the training data.
    process_index: which part of every batch to give, from 0.
    process_count: parts, usually processes.
    rows: the rows of the global batch in that part; None: the process_index-th
      run of batch_size / process_count of them.

  Raises:
    UserError: anything about the corpus, tokenizer or config that cannot work;
      the message names the flag.
  """
  if config.source not in SOURCES:
    raise unknown_name(
      "data source", config.source, SOURCES, "--config.data.source"
    )
  if config.batch_size % process_count:
    raise UserError(
      f"got data.batch_size {config.batch_size} for {process_count} processes:"
      " expected a multiple. Set it with --config.data.batch_size."
    )
  identity = {
    "source": config.source,
    "seq_len": config.seq_len,
    "batch_size": config.batch_size,
    "seed": seed,
  }
  size = config.batch_size // process_count
  if rows is None:
    rows = range(process_index * size, (process_index + 1) * size)
  if config.source == "hf":
    # Here, because everything else does without the optional packages.
    from attnres_jax.data import streaming

    # Each part reads its own documents, so a state is of so many parts.
    identity.update(process_count=process_count, process_index=process_index)
    parts = streaming.load(config, identity)
  else:
    parts = _load_stored(config, identity, rows)
  return Dataset(
    _identity=identity, _rows=rows, _prefetch=config.prefetch, **parts
  )


def _load_stored(config, identity: dict, rows: Sequence[int]) -> dict:
  corpus = _open_corpus(config)
  tokenizer = _find_tokenizer(config, corpus)
  store = token_store.load(corpus, tokenizer, config.val_percent)
  identity["fingerprint"] = store.facts["fingerprint"]
  windows = packing.TrainWindows(store.train, config.seq_len, identity["seed"])
  if windows.per_epoch < config.batch_size:
    raise UserError(
      f"{corpus.name} has {store.facts['train']['tokens']} training tokens,"
      f" expected at least one batch of {config.batch_size} x"
      f" {config.seq_len}. Set --config.data.batch_size,"
      " --config.data.seq_len or a larger corpus with --config.data.path."
    )

  def make_eval_windows():
    return packing.eval_windows(
      store.val, store.val_order, config.seq_len, config.eval_sequences
    )

  available = -(-(store.facts["val"]["tokens"] - 1) // config.seq_len)
  return dict(
    tokenizer=tokenizer,
    _train=lambda: pipeline.random_access(windows, config.batch_size, rows),
    _eval_windows=make_eval_windows,
    _facts=facts(
      config, tokenizer, store.facts, min(available, config.eval_sequences)
    ),
  )


def facts(config, tokenizer, stored: dict, eval_sequences: int) -> dict:
  """What `Dataset.describe` says."""
  found = {
    "source": config.source,
    "path": config.path,
    "fingerprint": stored["fingerprint"],
    "vocab_size": tokenizer.vocab_size,
    "seq_len": config.seq_len,
    "eval_sequences": eval_sequences,
    "token_bytes_exact": all(
      stored[side]["token_bytes_exact"]
      for side in ("train", "val")
      if side in stored
    ),
  }
  for side in ("train", "val"):
    for key in ("documents", "bytes", "tokens"):
      if side in stored:
        found[f"{side}_{key}"] = stored[side][key]
  if eval_sequences < config.eval_sequences:
    found["note"] = (
      f"the validation set has {eval_sequences} sequences, fewer than"
      f" data.eval_sequences {config.eval_sequences}: no more text is held out"
    )
  return found


def train_texts(
  documents: Iterable[Document], val_percent: float, name: str, num_bytes: int
) -> Iterator[str]:
  """Texts to train a tokenizer on: no held-out ones, and a sample if many.

  Args:
    documents: the corpus.
    val_percent: per cent of the documents that are held out.
    name: the corpus, for messages.
    num_bytes: of the corpus, about.
  """
  share = 10_000 * TOKENIZER_BYTES / max(num_bytes, 1)
  left = TOKENIZER_BYTES
  for doc, held_out in split(documents, val_percent, name):
    # Another hash than that of the split, or the share would be of its rest.
    if held_out or (left < TOKENIZER_BYTES and rank("bpe" + doc.id) >= share):
      continue
    yield doc.text[:left]
    left -= len(doc.text)
    if left <= 0:
      return


def _open_corpus(config) -> Corpus:
  if config.source == "sotu":
    return corpora.sotu()
  if config.source == "pycode":
    return corpora.pycode(config.path, config.val_percent)
  return corpora.files(config.path, config.text_key)


def _find_tokenizer(config, corpus: Corpus) -> Tokenizer:
  if (
    config.source == "sotu"
    and not config.tokenizer
    and config.vocab_size == SHIPPED_VOCAB
    and config.val_percent <= SHIPPED_VAL_PERCENT
  ):
    return tokenizer_lib.load(str(SHIPPED_TOKENIZER))
  identity = [corpus.key, config.val_percent]
  return find_tokenizer(
    config,
    identity,
    lambda: train_texts(
      corpus.documents(), config.val_percent, corpus.name, corpus.num_bytes
    ),
  )


def find_tokenizer(
  config, identity: list, texts: Callable[[], Iterable[str]]
) -> Tokenizer:
  """The tokenizer of config.data.tokenizer, or one trained and kept.

  Args:
    config: the group `data`.
    identity: what `texts` depends on.
    texts: what to train on, called if there is none yet.
  """
  if config.tokenizer:
    found = tokenizer_lib.load(config.tokenizer)
    tokenizer_lib.check_vocab(found, config.vocab_size, repr(config.tokenizer))
    return found
  identity = [
    token_store.VERSION,
    TOKENIZER_BYTES,
    config.vocab_size,
    *identity,
  ]
  digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
  folder = corpora.cache_folder() / "tokenizers" / digest[:24]
  file = folder / "tokenizer.json"
  if not file.exists():
    logging.info("Training a tokenizer once into %s", file)

    def write(part):
      trained = tokenizer_lib.train(texts(), config.vocab_size)
      trained.save(part / file.name)

    token_store.write_folder(folder, write)
  return tokenizer_lib.load(str(file))
