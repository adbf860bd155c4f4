"""Finds the plan of the phase-1 kernels for a shape, and writes it down.

Every candidate is compiled for the chip and its schedule read (static.py); no
TPU is needed. An entry is written to tuned/<chip>.json only where it beats the
plan that the kernel makes by itself.
"""

import json
import pathlib

import jax.numpy as jnp

from attnres_kernels.depth_attention import static

TUNED = pathlib.Path(__file__).parent / "tuned"
# What beats nothing by less than this is not worth an entry.
LEAST_GAIN = 0.03

CANDIDATES = tuple(
  dict(unroll=unroll, k_chunk=chunk, n_chunk=256)
  for unroll in (2, 4, 8)
  for chunk in (256, 512)
)


def key(case: static.Case, direction: str) -> str:
  """Of an entry; the same as in pallas_tpu_attend.plan."""
  return (
    f"attend_{direction}:R={case.sources}:Q={case.queries}:D={case.width}"
    f":{jnp.dtype(case.dtype)}"
  )


def tune(chip: str, case: static.Case, candidates=CANDIDATES) -> list[dict]:
  """Measures all candidates and updates tuned/<chip>.json.

  Returns:
    The rows of `static.measure`, each with its `plan`; {} is the kernel's own.
  """
  if case.op != "phase1":
    raise ValueError(
      f"got op {case.op}: expected phase1; phase 2 chooses by its own count."
    )
  rows = []
  for plan in ({}, *candidates):
    try:
      found = static.measure(chip, case, "pallas_tpu", plan)
    except RuntimeError as error:
      if not plan:
        raise
      rows.append(dict(chip=chip, plan=plan, error=str(error)[-200:]))
      continue
    rows += [row | dict(plan=plan) for row in found]
  path = TUNED / f"{chip}.json"
  entries = json.loads(path.read_text()) if path.exists() else {}
  for direction, judged in (
    ("forward", "forward_saving"), ("backward", "backward")
  ):  # fmt: skip
    cycles = {
      json.dumps(row["plan"]): row["cycles_ratio"]
      for row in rows
      if row.get("direction") == judged
    }
    best = min(cycles, key=cycles.get)
    entries.pop(key(case, direction), None)
    if cycles[best] < (1 - LEAST_GAIN) * cycles["{}"]:
      entries[key(case, direction)] = json.loads(best)
  TUNED.mkdir(exist_ok=True)
  path.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
  return rows
