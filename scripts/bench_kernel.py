"""Measures the depth-attention op: compiled for TPUs, or timed where it runs.

  python -m scripts.bench_kernel --static      what the TPU compiler makes of it
  python -m scripts.bench_kernel --cpu         timed on this CPU
  python -m scripts.bench_kernel               timed on the default device

--static needs no TPU. It prints one JSON object per chip, op, direction, shape
and implementation: scheduled bundles of a grid step, the HBM floor of the step
in cycles, their ratio, bytes moved over the least that can be, planned VMEM.
--markdown=FILE also writes them as a table. All 14 shapes on three chips take
about 30 minutes on two cores; --chips, --models and --implementations choose.
--tune tries several plans of each shape and writes what beats the kernels' own
choice to kernels/depth_attention/tuned/.

Timed, it prints what a block's depth mixing takes, forward and backward, and
how much memory, beside plain JAX in the same process: medians of ratios.
"""

import datetime
import json
import pathlib
import statistics

import jax
from absl import flags
from tqdm import tqdm

from attnres_jax import cli, provenance
from attnres_jax.errors import UserError, unknown_name
from attnres_kernels.depth_attention import bench, static, tune

_STATIC = flags.DEFINE_bool("static", False, "Compile for TPUs; run nothing.")
_CPU = flags.DEFINE_bool("cpu", False, "Time on the CPU.")
_CHIPS = flags.DEFINE_list(
  "chips", list(static.CHIPS), "Which TPUs to compile for."
)
_MODELS = flags.DEFINE_list(
  "models", [], "Only the shapes of these models (--static). Default: all."
)
_IMPLEMENTATIONS = flags.DEFINE_list(
  "implementations", ["pallas_tpu", "xla"], "What to compile (--static)."
)
_TUNE = flags.DEFINE_bool(
  "tune", False, "Try plans of the phase-1 kernels; keep the best (--static)."
)
_MARKDOWN = flags.DEFINE_string(
  "markdown", None, "Also write the rows of --static as a table to this file."
)
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Timed rounds; medians count.")
_RESIDENT = flags.DEFINE_bool(
  "resident", False, "Also measure peak resident memory (Linux)."
)


def main(argv) -> int:
  del argv
  if _STATIC.value and _CPU.value:
    raise UserError("got --static and --cpu: expected one of them, or none.")
  if _ROUNDS.value < 1:
    raise UserError(
      f"got rounds {_ROUNDS.value}: expected an integer >= 1. Set it with"
      " --rounds."
    )
  if _STATIC.value:
    return _static()
  if _CPU.value:
    jax.config.update("jax_platforms", "cpu")
  about = dict(commit=provenance.commit(), versions=_versions())
  for shape in tqdm(bench.SHAPES, desc="shapes", unit="shape"):
    rows = bench.run([shape], rounds=_ROUNDS.value, resident=_RESIDENT.value)
    for row in rows:
      print(json.dumps(row | about), flush=True)
  return 0


def _static() -> int:
  models = sorted({case.model for case in static.CASES})
  for option, names, known in (
    ("chip", _CHIPS.value, static.CHIPS),
    ("model", _MODELS.value, models),
    ("implementation", _IMPLEMENTATIONS.value, ("pallas_tpu", "xla")),
  ):
    for name in names:
      if name not in known:
        raise unknown_name(option, name, known, f"--{option}s")
  try:
    static.compiler_environment()
  except RuntimeError as error:
    raise UserError(str(error)) from error
  jobs = [
    (chip, case, implementation)
    for case in static.CASES
    if not _MODELS.value or case.model in _MODELS.value
    for implementation in _IMPLEMENTATIONS.value
    for chip in _CHIPS.value
  ]
  about = dict(
    measured="compiled for TPU, static",
    date=datetime.date.today().isoformat(),
    commit=provenance.commit(),
    versions=_versions(),
  )
  rows = []
  if _TUNE.value:
    shapes = dict.fromkeys((c, s) for c, s, _ in jobs if s.op == "phase1")
    for chip, case in tqdm(shapes, desc="shapes", unit="shape"):
      for row in tune.tune(chip, case):
        print(json.dumps(row | about), flush=True)
    return 0
  for job in tqdm(jobs, desc="compilations", unit="program"):
    for row in static.measure(*job):
      rows.append(row | about)
      print(json.dumps(rows[-1]), flush=True)
  if _MARKDOWN.value:
    pathlib.Path(_MARKDOWN.value).write_text(_table(rows))
  return 0


def _versions() -> dict:
  found = {name: provenance.versions()[name] for name in ("jax", "jaxlib")}
  found["libtpu"] = static.compiler_version()
  return found


def _table(rows) -> str:
  """One line per shape and direction, the chips side by side."""
  chips = list(dict.fromkeys(row["chip"] for row in rows))
  lines = [
    "| op | direction | shape | "
    + " | ".join(chip for chip in chips)
    + " | bytes / least | xla: bytes / least |",
    "|---" * (5 + len(chips)) + "|",
  ]
  cells = {}
  for row in rows:
    total = row["total_dtype"]
    shape = f"{row['model']}: R={row['R']} Q={row['Q']} D={row['D']}"
    shape += f", {total} sum" if total else ""
    cell = cells.setdefault((row["op"], row["direction"], shape), {})
    cell[row["implementation"], row["chip"]] = row
  for (op, direction, shape), cell in cells.items():
    ratios = []
    for chip in chips:
      row = cell.get(("pallas_tpu", chip))
      ratios.append(
        f"**{row['ratio']:.2f}** ({row['cycles_ratio']:.2f})"
        f" of {row['floor_cycles']}, tile {row['tile']}"
        if row
        else "-"
      )
    moved = [
      _median(cell, implementation, chips)
      for implementation in ("pallas_tpu", "xla")
    ]
    lines.append(f"| {' | '.join([op, direction, shape, *ratios, *moved])} |")
  about = rows[0]
  versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
  lines += [
    "",
    "Per chip: **bundles / floor** (with waits / floor) of floor cycles per"
    " grid step, tokens per grid step.",
    f"{about['measured']}; {about['date']}; {versions}.",
  ]
  return "\n".join(lines) + "\n"


def _median(cell, implementation, chips) -> str:
  found = [
    cell[implementation, chip]["bytes_ratio"]
    for chip in chips
    if (implementation, chip) in cell
  ]
  return f"{statistics.median(found):.2f}" if found else "-"


if __name__ == "__main__":
  cli.run(main)
