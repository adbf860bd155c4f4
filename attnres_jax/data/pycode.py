"""Makes the pycode corpus: the .py files of pinned wheels, split in two.

Every wheel is pure Python, under a permissive licence, pinned by version and
hash, so the corpus is the same bytes everywhere.
"""

import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from attnres_jax.data.documents import is_held_out
from attnres_jax.errors import UserError

REQUIREMENTS = pathlib.Path(__file__).parent / "assets/pycode-requirements.txt"
# Part of the manifest: raise it when the same wheels give other documents.
VERSION = 1

# Data written as code: base64, tables, compressed test fixtures.
MAX_LINE = 1000
# Mostly empty __init__.py; nothing to learn from.
MIN_CHARACTERS = 64
_GENERATED = re.compile(
  r"generated (by|from|file|code|automatically)|auto-?generated|do not edit"
)
_HEADER_LINES = 5
# A held-out file of which more than this share of its long lines stands in
# training files is a copy in all but name.
MAX_SEEN = 0.5
_LONG_LINE = 40


class Source(NamedTuple):
  """One file: id is package:path."""

  id: str
  text: str
  package: str
  licence: str


def fetch(
  folder: pathlib.Path,
  val_percent: int,
  requirements: pathlib.Path = REQUIREMENTS,
) -> tuple[dict, bool]:
  """Downloads the wheels and writes the corpus, unless it is there.

  Args:
    folder: gets train.jsonl, val.jsonl and, last of all, manifest.json.
    val_percent: per cent of the files that are held out.
    requirements: pip's format, with hashes; a comment after each requirement
      is the SPDX name of its licence.

  Returns:
    The manifest and whether anything was written.

  Raises:
    UserError: pip cannot download, or the folder cannot be written.
  """
  wanted = {
    "version": VERSION,
    "requirements_sha256": _sha256(requirements.read_bytes()),
    "val_percent": val_percent,
  }
  manifest = read_manifest(folder)
  if manifest and all(manifest.get(key) == wanted[key] for key in wanted):
    return manifest, False
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
      part = pathlib.Path(part)
      _download(requirements, part)
      sources = read_wheels(part, licences(requirements))
      train, val, dropped = select(sources, val_percent)
      return _write(folder, part, wanted, train, val, dropped), True
  except OSError as error:
    raise UserError(
      f"cannot write the corpus into {str(folder)!r} ({error.strerror})."
      " Set another folder with --folder."
    ) from None


def read_manifest(folder: pathlib.Path) -> dict | None:
  """The manifest of a whole corpus; None if it or a file is not whole."""
  try:
    manifest = json.loads((folder / "manifest.json").read_text())
    for side in ("train", "val"):
      data = (folder / f"{side}.jsonl").read_bytes()
      if _sha256(data) != manifest[side]["file_sha256"]:
        return None
  except (OSError, ValueError, KeyError, TypeError):
    return None
  return manifest


def licences(requirements: pathlib.Path) -> dict[str, str]:
  """Package name, in lower case, to the licence in its comment."""
  found = {}
  for line in requirements.read_text().splitlines():
    pin, _, licence = line.partition(" #")
    if "==" in pin:
      found[pin.split("==")[0].strip().lower()] = licence.strip()
  return found


def read_wheels(
  folder: pathlib.Path, licence_of: dict[str, str]
) -> Iterator[Source]:
  """The .py files of every wheel in a folder, sorted."""
  for wheel in sorted(folder.glob("*.whl"), key=lambda p: p.name.lower()):
    package = wheel.name.split("-")[0].lower()
    with zipfile.ZipFile(wheel) as archive:
      for path in sorted(archive.namelist()):
        if not path.endswith(".py"):
          continue
        # Python's default encoding is UTF-8; the few others are left out.
        text = archive.read(path).decode(errors="ignore")
        yield Source(f"{package}:{path}", text, package, licence_of[package])


def why_not(text: str) -> str | None:
  """The reason to leave a file out, or None."""
  if len(text.strip()) < MIN_CHARACTERS:
    return "short"
  lines = text.splitlines()
  if max(map(len, lines)) > MAX_LINE:
    return "long lines"
  if _GENERATED.search("\n".join(lines[:_HEADER_LINES]).lower()):
    return "generated"
  return None


def select(
  sources: Iterable[Source], val_percent: float
) -> tuple[list[Source], list[Source], Counter]:
  """Filters, de-duplicates and splits.

  Returns:
    Training files, held-out files, and how many were dropped for which reason.
  """
  train, val = [], []
  dropped = Counter()
  seen = set()
  for source in sources:
    reason = why_not(source.text)
    if reason is None and source.text in seen:
      reason = "duplicate"
    if reason:
      dropped[reason] += 1
      continue
    seen.add(source.text)
    held_out = is_held_out(source.id, val_percent)
    (val if held_out else train).append(source)
  seen_lines = set()
  for source in train:
    seen_lines |= _long_lines(source.text)
  clean = [source for source in val if not _is_leak(source, seen_lines)]
  dropped["held out but seen in training"] = len(val) - len(clean)
  return train, clean, dropped


def _long_lines(text: str) -> set[str]:
  lines = (line.strip() for line in text.splitlines())
  return {line for line in lines if len(line) >= _LONG_LINE}


def _is_leak(source: Source, seen_lines: set[str]) -> bool:
  lines = _long_lines(source.text)
  return len(lines & seen_lines) > MAX_SEEN * len(lines)


def _download(requirements: pathlib.Path, folder: pathlib.Path) -> None:
  command = [
    sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
    "--disable-pip-version-check", "--require-hashes",
    "--only-binary=:all:", "--dest", str(folder), "-r", str(requirements),
  ]  # fmt: skip
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
    reason = lines[0] if lines else f"exit status {done.returncode}"
    raise UserError(
      f"pip cannot download the wheels of pycode ({reason}). Check that pip"
      " reaches a package index, or choose another --config.data.source."
    )


def _write(folder, part, wanted, train, val, dropped) -> dict:
  content = hashlib.sha256()
  sides = {}
  for side, sources in (("train", train), ("val", val)):
    rows = []
    for source in sources:
      content.update(f"{source.id}\0{source.text}\0".encode())
      rows.append(json.dumps(source._asdict()) + "\n")
    data = "".join(rows).encode()
    (part / f"{side}.jsonl").write_bytes(data)
    sides[side] = {
      "documents": len(sources),
      "bytes": sum(len(source.text.encode()) for source in sources),
      "file_bytes": len(data),
      "file_sha256": _sha256(data),
    }
  packages = {}
  for source in [*train, *val]:
    entry = packages.setdefault(
      source.package, {"licence": source.licence, "documents": 0, "bytes": 0}
    )
    entry["documents"] += 1
    entry["bytes"] += len(source.text.encode())
  manifest = {
    **wanted,
    "content_sha256": content.hexdigest(),
    **sides,
    "dropped": dict(sorted(dropped.items())),
    "packages": packages,
  }
  (part / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
  # Without a manifest there is no corpus, so nobody reads a half-changed one.
  (folder / "manifest.json").unlink(missing_ok=True)
  for name in ("train.jsonl", "val.jsonl", "manifest.json"):
    (part / name).replace(folder / name)
  return manifest


def _sha256(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()
