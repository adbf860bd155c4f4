"""Attention over depth as pure functions: partial results and their merge.

A partial result of a query over some of its sources is (o, m, l): the weighted
sum of the raw sources without the softmax's denominator, the largest logit,
and the sum of the shifted exponentials. Two of them merge exactly
(Algorithm 1 of the paper), which is what lets finished sources be read once
for a whole block of queries (phase 1) while the running sum joins later
(phase 2). Everything here is float32; the caller casts once at the end.

This is the general form: any activation, depth heads, logits from anywhere.
The kernel package has the paper's own case, faster.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnres_kernels.depth_attention.xla import not_inlined

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
    weigh: logits [Q R B T H] -> (weights [Q R B T H], shift [Q B T H]).
    normalised: whether the result is divided by the sum of the weights.
  """

  weigh: Callable
  normalised: bool


def _exponential(logits):
  # The shift cancels in every result, so no gradient may flow through it.
  shift = jax.lax.stop_gradient(logits.max(1))
  return jnp.exp(logits - shift[:, None]), shift


def _sigmoid(logits):
  return jax.nn.sigmoid(logits), jnp.zeros_like(logits[:, 0])


ACTIVATIONS = {
  "softmax": Activation(_exponential, normalised=True),
  # The paper does not say whether sigmoid weights are renormalised: both.
  "sigmoid": Activation(_sigmoid, normalised=False),
  "normalised_sigmoid": Activation(_sigmoid, normalised=True),
}


def inverse_rms(v: Float[Array, "B T D"], eps: float) -> Float[Array, "B T 1"]:
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


@jax.custom_vjp
def mix(
  weights: Float[Array, "Q R B T H"], sources: tuple[Float[Array, "B T D"], ...]
) -> tuple[Float[Array, "B T D"], ...]:
  """out_q = sum_r weights[q, r] * source_r: Q mixtures of R sources, float32.

  Every source is an array of its own, never stacked. The derivative is written
  out for speed: left to autodiff, every slice of `weights` becomes a padded
  array, which is quadratic in R.
  """
  return _mix(weights, sources)


@not_inlined()
def _mix(weights, sources):
  return tuple(
    sum(scale_heads(w, v) for w, v in zip(row, sources, strict=True))
    for row in weights
  )


@not_inlined()
def _mix_backward(saved, d_outs):
  weights, sources = saved
  heads = weights.shape[-1]

  def dot(d_out, v):
    product = d_out * v.astype(jnp.float32)
    return product.reshape(*product.shape[:-1], heads, -1).sum(-1)

  d_weights = jnp.stack(
    [jnp.stack([dot(d_out, v) for v in sources]) for d_out in d_outs]
  )
  d_sources = tuple(
    sum(scale_heads(weights[q, r], d_out) for q, d_out in enumerate(d_outs))
    .astype(v.dtype)
    for r, v in enumerate(sources)
  )  # fmt: skip
  return d_weights, d_sources


mix.defvjp(lambda w, v: (_mix(w, v), (w, v)), _mix_backward)


def attend(
  logits: Float[Array, "Q R B T H"],
  sources: tuple[Float[Array, "B T D"], ...],
  activation: Activation,
) -> list[Partial]:
  """The partial results of Q queries over R >= 1 sources."""
  weights, shifts = activation.weigh(logits)
  outs = mix(weights, sources)
  return [
    Partial(*parts) for parts in zip(outs, shifts, weights.sum(1), strict=True)
  ]


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
