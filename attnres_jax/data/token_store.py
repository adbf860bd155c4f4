"""A corpus as token ids in memory-mapped files, made once and kept.

Tokenising as training goes would cost more time than a small model's step;
reading mapped ids costs next to nothing and is random access.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import pathlib
import shutil
import uuid
from collections.abc import Iterator

import numpy as np
from absl import logging

from attnres_jax.data import corpora
from attnres_jax.data.corpora import Corpus
from attnres_jax.data.documents import split
from attnres_jax.data.tokenizer import Tokenizer
from attnres_jax.errors import UserError

# Part of every cache key: raise it when the files change their meaning.
VERSION = 1
# Characters handed to the tokenizer at a time.
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Documents of one side, each as eos + text + eos.

  Attributes:
    ids: uint16 or uint32 [tokens], all documents on end; memory-mapped.
    offsets: int64 [documents + 1], where each begins; the last is `tokens`.
  """

  ids: np.ndarray
  offsets: np.ndarray

  @property
  def num_documents(self) -> int:
    return len(self.offsets) - 1


@dataclasses.dataclass(frozen=True)
class Store:
  """Both sides and the facts about them.

  Attributes:
    val_order: int64 [documents of val], a fixed shuffle: corpora are sorted by
      topic or date, and a validation set is its beginning.
    facts: documents, bytes and tokens per side, and `fingerprint`, a hash of
      every text, its side and the tokenizer.
  """

  train: Tokens
  val: Tokens
  val_order: np.ndarray
  facts: dict


def load(corpus: Corpus, tokenizer: Tokenizer, val_percent: float) -> Store:
  """Opens the store of a corpus, after making it if there is none.

  Raises:
    UserError: the corpus cannot be read or split, or the cache not written.
  """
  identity = [VERSION, corpus.key, val_percent, tokenizer.sha256]
  digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
  folder = corpora.cache_folder() / "tokens" / digest[:24]
  store = _open(folder)
  if store is None:
    logging.info(
      "Tokenising %s (%.1f MB) once into %s", corpus.name,
      corpus.num_bytes / 1e6, folder,
    )  # fmt: skip
    if folder.is_dir():
      _discard(folder)  # somebody tidied up half of it
    _build(corpus, tokenizer, val_percent, folder)
    store = _open(folder)
  return store


def write_folder(folder: pathlib.Path, write) -> None:
  """Makes a folder that is either whole or not there.

  Of several processes that want the same one, on a file system with locks one
  makes it and the others wait; without locks, all make it and one is kept.

  Args:
    folder: the target. If somebody else makes it first, theirs is kept.
    write: called with an empty folder to write into.

  Raises:
    UserError: no permission, or no space.
  """
  part = _beside(folder)
  try:
    part.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
      if folder.is_dir():
        return
      part.mkdir()
      write(part)
      _publish(part, folder)
  except OSError as error:
    raise UserError(
      f"cannot write the data cache {str(folder.parent)!r} ({error})."
      " Set another folder with the environment variable ATTNRES_CACHE."
    ) from None
  finally:
    shutil.rmtree(part, ignore_errors=True)


def _publish(part: pathlib.Path, folder: pathlib.Path) -> None:
  try:
    part.rename(folder)
  except OSError:
    if not folder.is_dir():
      raise


def _discard(folder: pathlib.Path) -> None:
  """Removes a store that is not whole.

  It is renamed first: another process may do the same, or have put a whole one
  in its place a moment ago.
  """
  aside = _beside(folder)
  with contextlib.suppress(OSError):
    folder.rename(aside)
    if _open(aside) is not None:
      _publish(aside, folder)
  shutil.rmtree(aside, ignore_errors=True)


def _beside(folder: pathlib.Path) -> pathlib.Path:
  """A name that no other process uses, on this host or another."""
  return folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
  with path.open("a") as file:
    with contextlib.suppress(OSError):  # a file system without locks
      fcntl.flock(file, fcntl.LOCK_EX)
    try:
      yield
    finally:  # whoever waits for this one holds a file without a name: fine
      path.unlink(missing_ok=True)


class Writer:
  """Appends documents to the files of one side."""

  def __init__(self, folder: pathlib.Path, side: str, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    self._file = (folder / f"{side}.bin").open("wb")
    self._offsets_path = folder / f"{side}_offsets.npy"
    self._lengths = []
    self._waiting, self._waiting_size = [], 0
    self._counted_bytes = 0
    self.num_bytes = 0

  def add(self, text: str) -> None:
    self._waiting.append(text)
    self._waiting_size += len(text)
    if self._waiting_size >= _CHUNK:
      self._flush()

  def close(self) -> None:
    self._flush()
    self._file.close()
    np.save(self._offsets_path, np.cumsum([0, *self._lengths], dtype=np.int64))

  def facts(self) -> dict:
    return {
      "documents": len(self._lengths),
      "bytes": self.num_bytes,
      "tokens": int(sum(self._lengths)),
      # False: the tokenizer normalises, so bits per byte are approximate.
      "token_bytes_exact": self._counted_bytes == self.num_bytes,
    }

  def _flush(self):
    eos = self._tokenizer.eos_id
    for ids in self._tokenizer.encode_batch(self._waiting):
      doc = np.array([eos, *ids, eos], self._dtype)
      doc.tofile(self._file)
      self._lengths.append(len(doc))
      self._counted_bytes += int(
        self._tokenizer.token_bytes[doc].sum(dtype=float)
      )
    self.num_bytes += sum(len(text.encode()) for text in self._waiting)
    self._waiting, self._waiting_size = [], 0


def _build(corpus, tokenizer, val_percent, folder):
  def write(part):
    writers = [Writer(part, side, tokenizer) for side in ("train", "val")]
    fingerprint = hashlib.sha256(tokenizer.sha256.encode())
    order = []
    for doc, held_out in split(corpus.documents(), val_percent, corpus.name):
      writers[held_out].add(doc.text)
      fingerprint.update(f"{doc.id}\0{held_out}\0{doc.text}\0".encode())
      if held_out:
        order.append(hashlib.sha256(doc.id.encode()).hexdigest())
    for writer in writers:
      writer.close()
    np.save(part / "val_order.npy", np.argsort(order, kind="stable"))
    facts = {"fingerprint": fingerprint.hexdigest()[:16]}
    for side, writer in zip(("train", "val"), writers, strict=True):
      facts[side] = writer.facts()
    (part / "facts.json").write_text(json.dumps(facts, indent=2))

  write_folder(folder, write)


def _open(folder: pathlib.Path) -> Store | None:
  """None if the folder is not there or not whole."""
  try:
    facts = json.loads((folder / "facts.json").read_text())
    val_order = np.load(folder / "val_order.npy")
    train, val = (open_side(folder, side) for side in ("train", "val"))
  except (OSError, ValueError):
    return None
  return Store(train, val, val_order, facts)


def open_side(folder: pathlib.Path, side: str) -> Tokens:
  """Maps what a `Writer` wrote.

  Raises:
    OSError, ValueError: files are missing or of the wrong size.
  """
  offsets = np.load(folder / f"{side}_offsets.npy")
  file = folder / f"{side}.bin"
  item = file.stat().st_size / offsets[-1]
  dtype = {2: np.uint16, 4: np.uint32}.get(item)
  if dtype is None:
    raise ValueError(f"{file} has {item} bytes per token")
  return Tokens(np.memmap(file, dtype, mode="r"), offsets)
