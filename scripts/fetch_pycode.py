"""Fetches the corpus `pycode`: Python source code, 81 MB of text.

  python -m scripts.fetch_pycode
  python -m scripts.train --config=configs/train.py:data=pycode ...

Downloads ten pinned wheels with pip (38 MB), keeps the .py files that people
wrote, splits them into training and validation files and writes both as JSONL.
Run again, it finds the corpus and does nothing.
"""

import pathlib

from absl import flags

from attnres_jax import cli
from attnres_jax.data import corpora, pycode
from attnres_jax.errors import UserError

_FOLDER = flags.DEFINE_string(
  "folder",
  "",
  "Where the corpus goes, and what --config.data.path has to name. Empty:"
  " pycode in the data cache, which needs no --config.data.path.",
)
_VAL_PERCENT = flags.DEFINE_integer(
  "val_percent",
  5,
  "Files held out for validation, per cent; --config.data.val_percent has to"
  " be the same.",
)


def main(argv) -> int:
  del argv
  if not 0 < _VAL_PERCENT.value < 100:
    raise UserError(
      f"got val_percent {_VAL_PERCENT.value}: expected 1 to 99 (per cent)."
      " Set it with --val_percent."
    )
  folder = corpora.pycode_folder()
  if _FOLDER.value:
    folder = pathlib.Path(_FOLDER.value).expanduser()
  manifest, written = pycode.fetch(folder, _VAL_PERCENT.value)
  print(f"{folder}: {'written' if written else 'already there'}")
  for side in ("train", "val"):
    facts = manifest[side]
    print(
      f"  {side}: {facts['documents']} files, {facts['bytes'] / 1e6:.2f} MB"
    )
  dropped = (f"{n} {why}" for why, n in manifest["dropped"].items())
  print(f"  dropped: {', '.join(dropped)}")
  print(f"  SHA-256 of the content: {manifest['content_sha256']}")
  return 0


if __name__ == "__main__":
  cli.run(main)
