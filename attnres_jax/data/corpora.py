"""The corpora that `config.data.source` names, as streams of documents."""

import dataclasses
import hashlib
import json
import lzma
import os
import pathlib
from collections.abc import Callable, Iterator

from attnres_jax.data import readers
from attnres_jax.data.documents import Document
from attnres_jax.errors import UserError

ASSETS = pathlib.Path(__file__).parent / "assets"
SOTU = ASSETS / "sotu.jsonl.xz"
SOTU_SHA256 = "eee09d358796f4ccff45c311e811c957b65e9fc852f361be46b8fdf4c2be1ac3"


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A corpus that can be read through, from the beginning, any number of times.

  Attributes:
    name: for messages.
    key: changes whenever the documents may have changed; cheap to compute.
    num_bytes: about how much text there is, or less.
    documents: starts a new pass.
  """

  name: str
  key: str
  num_bytes: int
  documents: Callable[[], Iterator[Document]]


def cache_folder() -> pathlib.Path:
  """Where tokens, tokenizers and fetched corpora are kept.

  $ATTNRES_CACHE, or ~/.cache/attnres_jax.
  """
  return pathlib.Path(
    os.environ.get("ATTNRES_CACHE") or "~/.cache/attnres_jax"
  ).expanduser()


def sotu() -> Corpus:
  """State of the Union addresses, 1790 to 2021: 233 documents, 10.8 MB."""
  return Corpus("sotu", SOTU_SHA256, 10_761_202, _read_sotu)


def files(path: str, text_key: str) -> Corpus:
  """A file, folder or glob; see `readers.read`.

  Raises:
    UserError: nothing usable there.
  """
  found = readers.expand(path)
  stats = [(str(f.absolute()), f.stat()) for f in found]
  identity = [(name, s.st_size, s.st_mtime_ns) for name, s in stats]
  return Corpus(
    name=path,
    key=_hash(["files", text_key, readers.PIECE_CHARACTERS, identity]),
    num_bytes=sum(s.st_size for _, s in stats),
    documents=lambda: readers.read(found, text_key),
  )


def pycode(path: str, val_percent: float) -> Corpus:
  """Python source code, as scripts/fetch_pycode.py left it in a folder.

  Args:
    path: the folder; empty: the default of the script.
    val_percent: must be what the script split with.

  Raises:
    UserError: not fetched, not whole, or split differently.
  """
  folder = pathlib.Path(path).expanduser() if path else pycode_folder()
  fetch = f"python -m scripts.fetch_pycode --folder={folder}"
  try:
    manifest = json.loads((folder / "manifest.json").read_text())
    key, split_at = manifest["content_sha256"], manifest["val_percent"]
    sizes = [manifest[s]["file_bytes"] for s in ("train", "val")]
    stats = [(folder / f"{s}.jsonl").stat().st_size for s in ("train", "val")]
  except (OSError, ValueError, KeyError, TypeError):
    raise UserError(
      f"no pycode corpus in {str(folder)!r}: expected manifest.json,"
      f" train.jsonl and val.jsonl. Fetch it with {fetch}, or set its folder"
      " with --config.data.path."
    ) from None
  if stats != sizes:
    raise UserError(
      f"the pycode corpus in {str(folder)!r} is damaged: its files have"
      f" {stats} bytes, expected {sizes}. Fetch it again with {fetch}."
    )
  if split_at != val_percent:
    raise UserError(
      f"got data.val_percent {val_percent}, but the pycode corpus in"
      f" {str(folder)!r} is split at {split_at}: expected the same. Set"
      f" --config.data.val_percent={split_at}, or split it again with {fetch}"
      f" --val_percent={val_percent}."
    )

  def documents():
    for side in ("train", "val"):
      with (folder / f"{side}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
          row = json.loads(line)
          yield Document(row["id"], row["text"], held_out=side == "val")

  return Corpus("pycode", _hash([key, split_at]), sum(sizes), documents)


def pycode_folder() -> pathlib.Path:
  return cache_folder() / "pycode"


def _read_sotu() -> Iterator[Document]:
  packed = SOTU.read_bytes() if SOTU.exists() else b""
  got = hashlib.sha256(packed).hexdigest()
  if got != SOTU_SHA256:
    raise UserError(
      f"{str(SOTU)!r} has the SHA-256 {got[:12]}, expected"
      f" {SOTU_SHA256[:12]}: the shipped corpus is damaged. Install attnres_jax"
      " again, or choose another corpus with --config.data.source."
    )
  for line in lzma.decompress(packed).splitlines():
    yield Document(**json.loads(line))


def _hash(value) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()
