"""Hugging Face datasets, streamed: nothing is downloaded ahead or kept.

A stream is read in its own order, so documents are tokenised on the fly and
only nearby sequences are shuffled. A document is held out by the hash of its
text: the same text is always on the same side, without remembering any.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grain
import numpy as np
from absl import logging

from attnres_jax.data import corpora, packing, token_store
from attnres_jax.data import dataset as dataset_lib
from attnres_jax.data.documents import check_sides, content_id, is_held_out
from attnres_jax.data.packing import Batch
from attnres_jax.data.readers import check_text
from attnres_jax.data.token_store import Tokens
from attnres_jax.data.tokenizer import Tokenizer
from attnres_jax.errors import UserError

# Sequences are shuffled within this many batches, or tokens if that is fewer:
# what resuming may have to tokenise again.
SHUFFLE_BATCHES = 64
SHUFFLE_TOKENS = 1 << 21
# Held-out text to look for, per token of the validation set. English has 3 to 5
# bytes per token; if it turns out too little, `describe` says so.
VAL_BYTES_PER_TOKEN = 6
# Documents handed to the tokenizer together, so that it can use all cores.
_GROUP = 32
# Documents that stand for the whole stream in its fingerprint.
_FINGERPRINTED = 16


def load(config, identity: dict[str, Any]) -> dict[str, Any]:
  """The parts of a `dataset.Dataset` that reads a stream.

  The first time, the stream is read from its beginning until it has given
  enough held-out text, and enough text to train a tokenizer if none is named.

  Args:
    config: the group `data`.
    identity: gets the fingerprint.

  Raises:
    UserError: `datasets` is not installed, or there is no such dataset.
  """
  stream = DocumentStream(config)
  start = hashlib.sha256()
  for text, _ in islice(stream.all(), _FINGERPRINTED):
    start.update(f"{text}\0".encode())
  source = [
    token_store.VERSION, "hf", config.path, config.hf_config, config.hf_split,
    config.text_key, config.val_percent, start.hexdigest(),
  ]  # fmt: skip
  wanted = config.eval_sequences * config.seq_len * VAL_BYTES_PER_TOKEN
  tokenizer = dataset_lib.find_tokenizer(
    config, source, lambda: _tokenizer_texts(stream)
  )
  identity["fingerprint"] = _digest([*source, tokenizer.sha256])[:16]
  folder = corpora.cache_folder() / "tokens"
  folder /= _digest([*source, tokenizer.sha256, wanted])[:24]
  if not folder.is_dir():
    logging.info("Collecting held-out documents once into %s", folder)
    token_store.write_folder(
      folder, lambda part: _collect_val(stream, tokenizer, wanted, part)
    )
  val = token_store.open_side(folder, "val")
  val_facts = json.loads((folder / "facts.json").read_text())
  order = np.arange(val.num_documents)  # by hash: see `_collect_val`
  available = -(-(val_facts["tokens"] - 1) // config.seq_len)

  def make_train():
    rows = config.batch_size // identity["process_count"]
    windows = StreamedWindows(
      stream, tokenizer, config.seq_len,
      identity["process_index"], identity["process_count"],
    )  # fmt: skip
    group = min(SHUFFLE_BATCHES * rows, SHUFFLE_TOKENS // config.seq_len)
    shuffled = grain.experimental.WindowShuffleIterDataset(
      windows, window_size=max(group, rows), seed=identity["seed"] % (1 << 31)
    )
    return shuffled.batch(rows)

  return dict(
    tokenizer=tokenizer,
    _train=make_train,
    _eval_windows=lambda: packing.eval_windows(
      val, order, config.seq_len, config.eval_sequences
    ),
    _facts=dataset_lib.facts(
      config, tokenizer,
      {"val": val_facts, "fingerprint": identity["fingerprint"]},
      min(available, config.eval_sequences),
    ),
  )  # fmt: skip


class DocumentStream:
  """The texts of a dataset and their sides, from the beginning or a state."""

  def __init__(self, config):
    self.path = config.path
    self._text_key = config.text_key
    self.val_percent = config.val_percent
    self._open = lambda: _open(config.path, config.hf_config, config.hf_split)

  def all(self) -> Iterator[tuple[str, bool]]:
    """(text, True if held out) of all documents."""
    for text, held_out, _ in self.read(None, 0, 1):
      yield text, held_out

  def read(
    self, state: dict | None, process_index: int, process_count: int
  ) -> Iterator[tuple[str, bool, dict]]:
    """(text, held out, state from which the next document is read).

    Args:
      state: where to begin; None: at the beginning.
      process_index: this host reads its own part of the dataset.
      process_count: hosts.
    """
    rows = self._open()
    if process_count > 1:
      from datasets.distributed import split_dataset_by_node

      rows = split_dataset_by_node(rows, process_index, process_count)
    if state is not None:
      rows.load_state_dict(state)
    for row in rows:
      if self._text_key not in row:
        raise UserError(
          f"dataset {self.path!r}: got the columns {', '.join(row)}, expected"
          f" {self._text_key!r}. Set the column with --config.data.text_key."
        )
      text = check_text(row[self._text_key], self._text_key, self.path)
      if text.strip():
        held_out = is_held_out(content_id(text), self.val_percent)
        yield text, held_out, rows.state_dict()


class StreamedWindows(grain.IterDataset):
  """Windows of a stream of training documents, epoch after epoch."""

  def __init__(
    self,
    stream: DocumentStream,
    tokenizer: Tokenizer,
    seq_len: int,
    process_index: int,
    process_count: int,
  ):
    super().__init__()
    self._make = lambda: _WindowIterator(
      stream, tokenizer, seq_len, process_index, process_count
    )

  def __iter__(self) -> grain.DatasetIterator:
    return self._make()


class _WindowIterator(grain.DatasetIterator):
  """Cuts windows out of documents as they come.

  State: where the document that the next window begins in is read from, and
  how many of its tokens are used up.
  """

  def __init__(self, stream, tokenizer, seq_len, process_index, process_count):
    super().__init__()
    self._stream, self._tokenizer = stream, tokenizer
    self._seq_len = seq_len
    self._process = (process_index, process_count)
    self.set_state({"stream": None, "used": 0})

  def get_state(self) -> dict[str, Any]:
    return {"stream": self._states[0], "used": self._begin}

  def set_state(self, state: dict[str, Any]) -> None:
    self._begin = state["used"]
    self._documents = []
    # One more than documents: the last is where the next one is read from.
    self._states = [state["stream"]]
    self._rows = self._stream.read(state["stream"], *self._process)
    self._packed = None
    # In this pass; one that continues has read something before.
    self._found_any = state["stream"] is not None

  def __next__(self) -> Batch:
    needed = self._begin + self._seq_len + 1
    if self._packed is None or self._packed.num_tokens < needed:
      self._fill()
    window = self._packed.window(self._begin, self._seq_len)
    self._begin += self._seq_len
    while self._documents and len(self._documents[0]) <= self._begin:
      self._begin -= len(self._documents.pop(0))
      self._states.pop(0)
      self._packed = None  # it still begins with that document
    return window

  def _fill(self):
    """Reads on until there is a window, and packs what is there."""
    have = sum(map(len, self._documents))
    while have < self._begin + self._seq_len + 1:
      texts, states = self._next_group()
      for ids in self._tokenizer.encode_batch(texts):
        eos = self._tokenizer.eos_id
        self._documents.append(np.array([eos, *ids, eos], np.int32))
        have += len(self._documents[-1])
      self._states += states
    offsets = np.cumsum([0, *map(len, self._documents)], dtype=np.int64)
    tokens = Tokens(np.concatenate(self._documents), offsets)
    self._packed = packing.Stream(tokens, np.arange(tokens.num_documents))

  def _next_group(self) -> tuple[list[str], list[dict]]:
    """Some training documents, and the state after each."""
    texts, states = [], []
    for text, held_out, state in self._rows:
      if held_out:
        continue
      texts.append(text)
      states.append(state)
      if len(texts) == _GROUP:
        break
    if texts:
      self._found_any = True
      return texts, states
    if not self._found_any:
      raise UserError(
        f"process {self._process[0]} of {self._process[1]} finds no training"
        " document in its part of the dataset: expected some. Set another one"
        " with --config.data.path."
      )
    # The end: from the beginning again, and the state says so.
    self._found_any = False
    self._rows = self._stream.read(None, *self._process)
    self._states[-1] = None
    return [], []


def _open(path: str, name: str, split: str):
  """An `IterableDataset`.

  Raises:
    UserError: not installed, not found, no such split, ...
  """
  try:
    import datasets
  except ImportError:
    raise UserError(
      "data.source 'hf' needs the package datasets. Install it with"
      " pip install 'attnres_jax[hf]'."
    ) from None
  if not path:
    raise UserError(
      "got no data.path: data.source 'hf' needs the name of a dataset or a"
      " local folder. Set it with --config.data.path."
    )
  folder = pathlib.Path(path).expanduser()
  try:
    if any((folder / f).is_file() for f in ("state.json", "dataset_dict.json")):
      saved = datasets.load_from_disk(str(folder))  # of save_to_disk
      if isinstance(saved, datasets.DatasetDict):
        saved = saved[split]
      return saved.to_iterable_dataset()
    if folder.exists():
      path = str(folder)
    return datasets.load_dataset(
      path, name=name or None, split=split, streaming=True
    )
  except Exception as error:  # the library raises a dozen kinds
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    raise UserError(
      f"cannot stream the dataset {path!r} ({reason}). Set it with"
      " --config.data.path, --config.data.hf_config and"
      " --config.data.hf_split."
    ) from None


def _tokenizer_texts(stream: DocumentStream) -> Iterator[str]:
  """The beginning of the stream, without held-out documents."""
  left = dataset_lib.TOKENIZER_BYTES
  for text, held_out in stream.all():
    if not held_out:
      yield text[:left]
      left -= len(text)
    if left <= 0:
      return


def _collect_val(stream, tokenizer, wanted: int, folder: pathlib.Path) -> None:
  """Writes the first held-out documents, `wanted` bytes or all there are."""
  texts = {}
  train, size = 0, 0
  for text, held_out in stream.all():
    if not held_out:
      train += 1
    elif content_id(text) not in texts:
      texts[content_id(text)] = text
      size += len(text.encode())
    # A training document is needed, too: otherwise there is nothing to read.
    if size >= wanted and train:
      break
  check_sides(train, len(texts), stream.val_percent, stream.path)
  writer = token_store.Writer(folder, "val", tokenizer)
  for key in sorted(texts):
    writer.add(texts[key])
  writer.close()
  (folder / "facts.json").write_text(json.dumps(writer.facts()))


def _digest(value) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()
