"""Measures the input pipeline: does it ever keep a step waiting?

  python -m scripts.bench_data --config=configs/train.py:size=tiny --step_ms=50

Prints one JSON object: seconds to open the corpus, tokens per second when the
batches are taken as fast as they come, and how long a step of `--step_ms`
waits for its batch. Medians of several rounds.
"""

import json
import statistics
import time

from absl import flags
from ml_collections import config_flags

from attnres_jax import cli, data
from attnres_jax.errors import UserError

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/train.py:size=tiny", "The run whose data is measured."
)
_STEP_MS = flags.DEFINE_float(
  "step_ms", 50.0, "Duration of the step that the loader has to keep up with."
)
_BATCHES = flags.DEFINE_integer("batches", 100, "Batches in a round.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds; the median counts.")


def main(argv) -> int:
  del argv
  for flag in (_BATCHES, _ROUNDS):
    if flag.value < 1:
      raise UserError(
        f"got {flag.name} {flag.value}: expected an integer >= 1. Set it with"
        f" --{flag.name}."
      )
  config = _CONFIG.value
  begin = time.perf_counter()
  dataset = data.load(config.data, seed=config.run.seed)
  open_s = time.perf_counter() - begin
  iterator = dataset.train_iterator()
  try:
    begin = time.perf_counter()
    tokens = next(iterator)["tokens"].size
    first_batch_s = time.perf_counter() - begin
    free = [_take(iterator) for _ in range(_ROUNDS.value)]
    kept = [_take(iterator, _STEP_MS.value / 1e3) for _ in range(_ROUNDS.value)]
  finally:
    iterator.close()
  rates = [tokens * _BATCHES.value / sum(waits) for waits in free]
  wait_s = statistics.median(sum(waits) / len(waits) for waits in kept)
  step_s = _STEP_MS.value / 1e3
  report = {
    **dataset.describe(),
    "open_s": open_s,
    "first_batch_s": first_batch_s,
    "tokens_per_s": statistics.median(rates),
    "tokens_per_s_rounds": rates,
    "step_ms": _STEP_MS.value,
    "wait_ms_per_step": 1e3 * wait_s,
    "wait_fraction": wait_s / (wait_s + step_s),
    "rounds": _ROUNDS.value,
    "batches": _BATCHES.value,
  }
  print(json.dumps(report))
  return 0


def _take(iterator, step_s: float = 0.0) -> list[float]:
  """Seconds that each of the batches of a round was waited for."""
  waits = []
  for _ in range(_BATCHES.value):
    begin = time.perf_counter()
    next(iterator)
    waits.append(time.perf_counter() - begin)
    if step_s:
      time.sleep(step_s)
  return waits


if __name__ == "__main__":
  cli.run(main)
