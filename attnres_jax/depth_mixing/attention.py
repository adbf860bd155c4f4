"""Attention over depth as pure functions: partial results and their merge.

A partial result of a query over some of its sources is (o, m, l): the weighted
sum of the raw sources without the softmax's denominator, the largest logit,
and the sum of the shifted exponentials. Two of them merge exactly
(Algorithm 1 of the paper), which is what lets finished sources be read once
for a whole block of queries (phase 1) while the running sum joins later
(phase 2). Everything here is float32; the caller casts once at the end.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST  # logits: a TPU's default is too coarse


class Partial(NamedTuple):
  """One query's attention over a part of its sources.

  Attributes:
    out: sum of weight * source, before the division.
    max: the shift of the exponentials (0 for the sigmoid).
    sum: the sum of the weights.
  """

  out: Float[Array, "B T D"]
  max: Float[Array, "B T H"]
  sum: Float[Array, "B T H"]


class Activation(NamedTuple):
  """phi of the paper's Eq. 2.

  Attributes:
    weigh: logits [R, ...] -> (weights [R, ...], shift [...]).
    normalised: whether the result is divided by the sum of the weights.
  """

  weigh: Callable
  normalised: bool


def _exponential(logits):
  # The shift cancels in every result, so no gradient may flow through it.
  shift = jax.lax.stop_gradient(logits.max(0))
  return jnp.exp(logits - shift), shift


def _sigmoid(logits):
  return jax.nn.sigmoid(logits), jnp.zeros_like(logits[0])


ACTIVATIONS = {
  "softmax": Activation(_exponential, normalised=True),
  # The paper does not say whether sigmoid weights are renormalised: both.
  "sigmoid": Activation(_sigmoid, normalised=False),
  "normalised_sigmoid": Activation(_sigmoid, normalised=True),
}


def inverse_rms(
  v: Float[Array, "B T D"], eps: float
) -> Float[Array, "B T 1"]:
  """1 / RMS over the width, float32: RMSNorm(v) = v * inverse_rms(v)."""
  v = v.astype(jnp.float32)
  return jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)


def scale_heads(
  weight: Float[Array, "B T H"], v: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
  """Multiplies every group of D / H channels by its head's weight, float32."""
  *lead, d = v.shape
  h = weight.shape[-1]
  grouped = v.astype(jnp.float32).reshape(*lead, h, d // h)
  return (weight[..., None] * grouped).reshape(*lead, d)


def attend(
  logits: Float[Array, "R B T H"],
  sources: Sequence[Float[Array, "B T D"]],
  activation: Activation,
) -> Partial:
  """One query over R >= 1 sources, each an array of its own (no stacking)."""
  weights, shift = activation.weigh(logits)
  out = sum(scale_heads(w, v) for w, v in zip(weights, sources, strict=True))
  return Partial(out, shift, weights.sum(0))


def merge(a: Partial, b: Partial) -> Partial:
  """The partial result over the sources of both: exact, not approximate."""
  shift = jnp.maximum(a.max, b.max)
  scale_a, scale_b = jnp.exp(a.max - shift), jnp.exp(b.max - shift)
  return Partial(
    scale_heads(scale_a, a.out) + scale_heads(scale_b, b.out),
    shift,
    scale_a * a.sum + scale_b * b.sum,
  )


def normalise(
  partial: Partial, activation: Activation
) -> Float[Array, "B T D"]:
  """The finished mixture, float32."""
  if not activation.normalised:
    return partial.out
  return scale_heads(1 / partial.sum, partial.out)
