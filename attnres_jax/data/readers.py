"""Reads documents out of .txt, .jsonl, .parquet and .array_record files."""

import glob
import gzip
import json
import lzma
import os
import pathlib
import re
from collections.abc import Iterator

from attnres_jax.data.documents import Document, content_id
from attnres_jax.errors import UserError

SUFFIXES = (
  ".txt",
  ".jsonl",
  ".jsonl.gz",
  ".jsonl.xz",
  ".parquet",
  ".array_record",
)
# A lone .txt file is cut at blank lines into documents of at least this many
# characters: long enough to be worth a context, short enough to hold some out.
PIECE_CHARACTERS = 4096
_KNOB = "--config.data.path"


def expand(path: str) -> list[pathlib.Path]:
  """The files that a file name, folder or glob stands for, sorted.

  Raises:
    UserError: nothing there, or no file of a known kind.
  """
  expected = f"expected {', '.join(SUFFIXES)}. Set it with {_KNOB}."
  if not path:
    raise UserError(
      "got no data.path: data.source 'files' needs a file, folder or glob."
      f" Set it with {_KNOB}."
    )
  root = pathlib.Path(path).expanduser()
  if root.is_file():
    found = [root]
  elif root.is_dir():
    found = [p for p in sorted(root.rglob("*")) if _visible(p, root)]
    found = [p for p in found if p.is_file() and _suffix(p)]
  elif glob.has_magic(str(root)):
    found = sorted(map(pathlib.Path, glob.glob(str(root), recursive=True)))
    found = [p for p in found if p.is_file()]
  else:
    raise UserError(
      f"data.path {path!r} does not exist: expected a file, folder or glob."
      f" Set it with {_KNOB}."
    )
  if not found:
    raise UserError(f"data.path {path!r} holds no usable files: {expected}")
  for file in found:
    if not _suffix(file):
      raise UserError(f"data.path: cannot read {str(file)!r}: {expected}")
    if not os.access(file, os.R_OK):
      raise UserError(
        f"data.path: no permission to read {str(file)!r}. Set it with {_KNOB}."
      )
    if not file.stat().st_size:
      raise UserError(
        f"data.path: {str(file)!r} is empty: expected text in it. Set it"
        f" with {_KNOB}."
      )
  return found


def read(files: list[pathlib.Path], text_key: str) -> Iterator[Document]:
  """Yields the documents of the files one by one.

  A .txt file is one document, unless it is the only file: then it is cut at
  blank lines (see `PIECE_CHARACTERS`). A line of .jsonl, a row of .parquet
  and a record of .array_record are one document each; a record is JSON if it
  begins with `{`, and plain text otherwise. The id of a document is the hash
  of its text.

  Args:
    files: what `expand` returned.
    text_key: the JSON field or Parquet column that holds the text.

  Raises:
    UserError: not UTF-8, bad JSON or no such field; says where.
  """
  for file in files:
    kind = _suffix(file)
    if kind == ".txt":
      text = _decode(file.read_bytes(), str(file)).removeprefix("\ufeff")
      texts = _cut(text) if len(files) == 1 else [text]
    elif kind == ".parquet":
      texts = _read_parquet(file, text_key)
    elif kind == ".array_record":
      texts = _read_array_record(file, text_key)
    else:
      texts = _read_jsonl(file, text_key)
    for text in texts:
      if text.strip():
        yield Document(content_id(text), text)


def _visible(path: pathlib.Path, root: pathlib.Path) -> bool:
  parts = path.relative_to(root).parts
  return not any(part.startswith(".") for part in parts)


def _suffix(path: pathlib.Path) -> str | None:
  """The longest known suffix of a file name, or None."""
  name = path.name.lower()
  return max((s for s in SUFFIXES if name.endswith(s)), key=len, default=None)


def _decode(data: bytes, where: str) -> str:
  try:
    text = data.decode()
  except UnicodeDecodeError as error:
    raise UserError(
      f"{where} is not UTF-8 text (byte {error.start}): expected text. Set"
      f" the corpus with {_KNOB}."
    ) from None
  if "\0" in text:
    raise UserError(
      f"{where} is binary (it holds a zero byte): expected text. Set the"
      f" corpus with {_KNOB}."
    )
  return text


def _cut(text: str) -> Iterator[str]:
  """Cuts at blank lines, or at line ends where there are none."""
  parts = re.split(r"(?:\r?\n[ \t]*){2,}", text)
  joint = "\n\n"
  if len(parts) == 1:
    parts, joint = text.splitlines(), "\n"
  piece, length = [], 0
  for part in parts:
    piece.append(part)
    length += len(part) + len(joint)
    if length >= PIECE_CHARACTERS + len(joint):
      yield joint.join(piece)
      piece, length = [], 0
  if piece:
    yield joint.join(piece)


def _read_jsonl(file: pathlib.Path, text_key: str) -> Iterator[str]:
  openers = {".gz": gzip.open, ".xz": lzma.open}
  opener = openers.get(file.suffix.lower(), open)
  try:
    with opener(file, "rb") as lines:
      for number, line in enumerate(lines, start=1):
        if line.strip():
          yield _from_json(line, text_key, f"{file}:{number}")
  except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
    raise UserError(
      f"{file}: cannot decompress ({error}): expected a whole {file.suffix}"
      f" file. Set the corpus with {_KNOB}."
    ) from None


def _from_json(line: bytes, text_key: str, where: str) -> str:
  try:
    row = json.loads(_decode(line, where))
  except json.JSONDecodeError as error:
    raise UserError(
      f"{where}: bad JSON ({error.msg}): expected one object per line with"
      f" the field {text_key!r}. Set the corpus with {_KNOB}."
    ) from None
  if not isinstance(row, dict) or text_key not in row:
    got = ", ".join(map(repr, row)) if isinstance(row, dict) else repr(row)
    raise UserError(
      f"{where}: got {got[:80]}, expected an object with the field"
      f" {text_key!r}. Set the field with --config.data.text_key."
    )
  return check_text(row[text_key], text_key, where)


def check_text(text, text_key: str, where: str) -> str:
  """Returns `text` if it is a str that has a UTF-8 form, "" for None.

  Raises:
    UserError: it is something else; the message begins with `where`.
  """
  if text is None:
    return ""
  if not isinstance(text, str):
    raise UserError(
      f"{where}: field {text_key!r} is a {type(text).__name__}: expected a"
      " string. Set the field with --config.data.text_key."
    )
  try:
    text.encode()
  except UnicodeEncodeError:
    raise UserError(
      f"{where}: field {text_key!r} holds half of a surrogate pair: expected"
      f" valid Unicode. Set the corpus with {_KNOB}."
    ) from None
  return text


def _read_parquet(file: pathlib.Path, text_key: str) -> Iterator[str]:
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError:
    raise UserError(
      f"cannot read {str(file)!r}: Parquet needs pyarrow. Install it with"
      " pip install 'attnres_jax[hf]'."
    ) from None
  try:
    table = parquet.ParquetFile(file)
  except pyarrow.ArrowInvalid:
    raise UserError(
      f"{file} is not a Parquet file: expected one by its name. Set the"
      f" corpus with {_KNOB}."
    ) from None
  with table:
    columns = table.schema_arrow.names
    if text_key not in columns:
      raise UserError(
        f"{file}: got the columns {', '.join(columns)}, expected"
        f" {text_key!r}. Set the column with --config.data.text_key."
      )
    row = 0
    for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
      for text in batch.column(0).to_pylist():
        row += 1
        yield check_text(text, text_key, f"{file}, row {row}")


def _read_array_record(file: pathlib.Path, text_key: str) -> Iterator[str]:
  import grain

  try:
    records = grain.sources.ArrayRecordDataSource([str(file)])
    count = len(records)
  except Exception as error:  # array_record raises what C++ gave it
    raise UserError(
      f"{file} is not an ArrayRecord file ({str(error).splitlines()[0]}):"
      f" expected one by its name. Set the corpus with {_KNOB}."
    ) from None
  for i in range(count):
    record, where = records[i], f"{file}, record {i}"
    if record.lstrip()[:1] == b"{":
      yield _from_json(record, text_key, where)
    else:
      yield _decode(record, where)
