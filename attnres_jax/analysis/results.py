"""Result files: one JSON object per line and per finished run, never edited.

A line is identified by `config_hash`, the hash of the run's whole config. A
run whose config has changed gets a line of its own beside the older one;
whoever reads the file selects by hash, so runs of different configs never
share a table.
"""

import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence

from attnres_jax.errors import UserError
from attnres_jax.train.files import write_atomically
from attnres_jax.train.workdir import flatten

# What a reader may rely on; lines hold more.
REQUIRED_KEYS = (
  "row",
  "mixer",
  "size",
  "seed",
  "steps",
  "tokens",
  "val_loss",
  "val_bpb",
  "params",
  "throughput_ratio",
  "compile_s",
  "peak_bytes",
  "wall_s",
  "hardware",
  "commit",
  "date",
  "config",
  "config_hash",
  "key",
)

# Config values that change what is shown or kept, not what is computed.
_NOT_HASHED = (
  "run.progress",
  "run.tensorboard",
  "run.log_every",
  "run.checkpoint_every",
  "run.keep_checkpoints",
  "run.profile_start",
  "run.profile_steps",
  "data.prefetch",
)

# Options that came after the first result lines, and the value at which a run
# computes what it did before there was the option: lines keep their hash.
_NOT_HASHED_AT = {
  "mixer.implementation": None,
  "mesh.fsdp": 1,
  "mesh.expert": 1,
  "mesh.seq": 1,
  "mesh.tensor": 1,
}


def config_hash(config: dict) -> str:
  """Twelve hex digits that stand for what the run of `config` computes.

  Args:
    config: groups of configs/train.py, as nested dicts of plain values.
  """
  missing = object()
  kept = {
    k: v
    for k, v in flatten(config).items()
    if k not in _NOT_HASHED and v != _NOT_HASHED_AT.get(k, missing)
  }
  text = json.dumps(kept, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def read(
  path: str | os.PathLike, required: Sequence[str] = REQUIRED_KEYS
) -> list[dict]:
  """The lines of a result file, oldest first; [] if there is none.

  Raises:
    UserError: a line is not a JSON object or lacks one of `required`.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  lines = []
  for number, text in enumerate(path.read_text().splitlines(), start=1):
    try:
      line = json.loads(text)
      missing = [key for key in required if key not in line]
    except (json.JSONDecodeError, TypeError) as error:
      raise UserError(
        f"{path}:{number} is not a JSON object ({error}): mend or delete that"
        " line, or choose another folder with --results_dir."
      ) from None
    if missing:
      raise UserError(
        f"{path}:{number} lacks {', '.join(missing)}: mend or delete that"
        " line, or choose another folder with --results_dir."
      )
    lines.append(line)
  return lines


def append(path: str | os.PathLike, line: dict) -> None:
  """Adds one line; after a crash the file is the old or the new one.

  Runners that share the file wait for each other.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    fcntl.flock(folder, fcntl.LOCK_EX)
    old = path.read_text() if path.exists() else ""
    if old and not old.endswith("\n"):
      old += "\n"
    write_atomically(path, old + json.dumps(line) + "\n")
  finally:
    os.close(folder)
