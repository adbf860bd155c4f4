"""Validation loss, exact over uneven batches."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from attnres_jax.train.loss import LossSums, bits_per_byte
from attnres_jax.train.program import Program, TrainState
from attnres_jax.train.signals import StopRequest


def evaluate(
  program: Program,
  state: TrainState,
  batches: Sequence[dict[str, np.ndarray]],
  token_bytes: np.ndarray,
  stop: StopRequest | None = None,
) -> dict[str, float] | None:
  """Validation loss over all targets of all batches.

  Args:
    program: whose eval step to use.
    state: only the parameters are used.
    batches: this process's part of each.
    token_bytes: [V], UTF-8 bytes that each id stands for.
    stop: gives up as soon as it has a signal (on a single process).

  Returns:
    `val_loss` in nats per target and `val_bpb` in bits per byte; or None if it
    gave up.
  """
  sums = []
  for batch in batches:
    if stop is not None and stop.signal and jax.process_count() == 1:
      return None
    sums.append(program.eval_step(state, batch))
    if len(sums) > 1:  # one batch ahead; more would only fill the memory
      sums[-2] = jax.device_get(sums[-2])
  totals = LossSums(*np.sum(jax.device_get(sums), axis=0, dtype=np.float64))
  num_bytes = sum(
    float((token_bytes[batch["targets"]] * (batch["mask"] != 0)).sum())
    for batch in batches
  )
  if jax.process_count() > 1:
    num_bytes = float(
      multihost_utils.process_allgather(np.float64(num_bytes)).sum()
    )
  return dict(
    val_loss=float(totals.nll / totals.targets),
    val_bpb=bits_per_byte(float(totals.nll), num_bytes),
  )
