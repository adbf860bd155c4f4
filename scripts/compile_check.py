"""Compiles a train step for a slice of TPUs that need not be here.

  python -m scripts.compile_check --config=configs/train.py:size=436m \
    --config.opt.accumulate=6 --topology=v5p:4x4x4 --mixers=block --table

With the real TPU compiler, which needs no TPU. Prints one JSON line for the
PreNorm baseline (mixer residual) and one for each mixer: whether the program
fits, bytes per device, FLOPs and HBM traffic of a step (loops times their
trips), collectives, and the step's time as modelled from the compiled program
with the chip's published figures: modelled, not measured. --table prints a
table for people instead; --top=N also lists what takes most of that time.

--results_dir appends the lines to compile_check.jsonl in that folder and does
not compile again what is there. Exit code: 0 everything fits; 1 something does
not, or the compiler failed; 2 a flag, the config, mesh or topology is wrong.
"""

import json
import pathlib
import sys

from absl import flags
from ml_collections.config_flags import config_flags
from tqdm import tqdm

from attnres_jax import cli
from attnres_jax.analysis import compile_check, compile_table
from attnres_jax.depth_mixing import registry

_CONFIG = cli.define_config("configs/train.py", "FILE:ARGUMENTS.")
_TOPOLOGY = flags.DEFINE_string(
  "topology", "v5p:2x2x1", "The slice, CHIP:SHAPE, such as v6e:16x16."
)
_MESH = flags.DEFINE_string(
  "mesh", None, "AXIS=SIZE,... instead of --config.mesh; -1: all others."
)
_MIXERS = flags.DEFINE_list(
  "mixers", [], "What to compile beside the baseline; all: every mixer."
  " Default: the config's own.",
)  # fmt: skip
_PROGRAM = flags.DEFINE_enum(
  "program", "train", compile_check.PROGRAMS, "What to compile."
)
_TABLE = flags.DEFINE_bool("table", False, "Print a table, not JSON lines.")
_TOP = flags.DEFINE_integer(
  "top", 0, "Also list so many operations by their modelled time."
)
_RESULTS_DIR = flags.DEFINE_string(
  "results_dir", None, "Folder of compile_check.jsonl, to add lines to."
)


def main(argv) -> int:
  del argv
  config = _CONFIG.value
  if _MESH.value is not None:
    mesh = compile_check.parse_mesh(_MESH.value, list(config.mesh))
    with config.unlocked():
      config.mesh.update(dict.fromkeys(config.mesh, 1) | mesh)
  mixers = _MIXERS.value
  if mixers == ["all"]:
    mixers = list(registry.MIXERS)
  path = None
  if _RESULTS_DIR.value is not None:
    path = pathlib.Path(_RESULTS_DIR.value, "compile_check.jsonl")
  jobs = compile_check.jobs(
    _label(), config, _PROGRAM.value, _TOPOLOGY.value, mixers, _TOP.value
  )
  rows, failed = [], False
  progress = tqdm(jobs, desc="compilations", unit="program", file=sys.stderr)
  for row in compile_check.run(progress, path):
    rows.append(row)
    if not _TABLE.value:
      print(json.dumps(row), flush=True)
  if _TABLE.value:
    print(compile_table.table(rows))
  for row in rows:
    if not row["fits"]:
      failed = True
      print(f"{row['mixer']} does not fit: {row['reason']}", file=sys.stderr)
  return 1 if failed else 0


def _label() -> str:
  """The config as it was given, without what the mesh and mixers say."""
  flag = flags.FLAGS["config"]
  words = [config_flags.get_config_filename(flag)]
  for key, value in config_flags.get_override_values(flag).items():
    words.append(f"--config.{key}={value}")
  return " ".join(words)


if __name__ == "__main__":
  cli.run(main)
