"""How fast one training step is beside another, also on a busy machine."""

import statistics
import time
from collections.abc import Mapping

import jax

from attnres_jax.train.program import Program


def throughput_ratio(
  program: Program,
  baseline: Program,
  batch: Mapping,
  rounds: int,
  max_seconds: float,
) -> float:
  """Tokens per second of one training step over another's.

  Steps of both are timed in turns, each pair in the other order than the last,
  so that a slow phase of the machine hits both; the median of the pairs' ratios
  is what a stray interruption leaves unmoved.

  Args:
    program: the row's.
    baseline: the baseline's, for batches of the same shape.
    batch: any batch.
    rounds: pairs of timed steps, at least 1.
    max_seconds: no new pair is begun after that, once there are 3.
  """
  programs = [program, baseline]
  states = [p.init(0) for p in programs]

  def seconds(which: int) -> float:
    start = time.perf_counter()
    states[which], metrics = programs[which].train_step(states[which], batch)
    jax.block_until_ready((states[which], metrics))
    return time.perf_counter() - start

  seconds(0), seconds(1)  # the first step is not like the others
  ratios = []
  start = time.perf_counter()
  for i in range(rounds):
    order = (0, 1) if i % 2 else (1, 0)
    took = {which: seconds(which) for which in order}
    ratios.append(took[1] / took[0])
    if i >= 2 and time.perf_counter() - start > max_seconds:
      break
  return statistics.median(ratios)
