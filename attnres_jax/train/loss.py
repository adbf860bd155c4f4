"""Cross entropy, in float32, as sums: exact over uneven masks."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LossSums(NamedTuple):
  """Sums over the targets of a batch whose mask is 1; float32 scalars.

  Attributes:
    nll: of -log p(target), in nats.
    z: of log(sum exp logits)^2.
    targets: of the mask: how many targets count.
  """

  nll: Float[Array, ""]
  z: Float[Array, ""]
  targets: Float[Array, ""]


def loss_sums(
  logits: Float[Array, "B T V"],
  targets: Int[Array, "B T"],
  mask: Int[Array, "B T"],
) -> LossSums:
  """Sums of a batch. Divide by the summed `targets` for nats per token.

  Args:
    logits: any float dtype; summed in float32.
    targets: ids below V where the mask is 1, anything elsewhere.
    mask: 1 where the target counts, 0 elsewhere.
  """
  logits = logits.astype(jnp.float32)
  counts = mask != 0
  targets = jnp.where(counts, targets, 0)
  log_z_BT = jax.nn.logsumexp(logits, axis=-1)
  target_BT = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  # `where`, not a product: what is masked out may be infinite.
  return LossSums(
    nll=jnp.sum(jnp.where(counts, log_z_BT - target_BT, 0.0)),
    z=jnp.sum(jnp.where(counts, log_z_BT**2, 0.0)),
    targets=jnp.sum(counts, dtype=jnp.float32),
  )


def bits_per_byte(nll: float, num_bytes: float) -> float:
  """Summed nats over the UTF-8 bytes that the targets stand for, in bits."""
  return nll / math.log(2) / num_bytes
