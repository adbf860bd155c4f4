"""The literal equations, one a line: the oracle of the tests.

float64 inputs are computed in float64 throughout, anything else in float32.
Gradients are those of plain autodiff. Nothing here is shared with the other
implementations except the types.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnres_kernels.depth_attention.types import (
  Attended,
  Merged,
  MergeOptions,
)

HIGHEST = jax.lax.Precision.HIGHEST


def attend(
  queries: Float[Array, "Q D"],
  sources: tuple[Float[Array, "... T D"], ...],
  eps: float | None,
) -> tuple[Attended, ...]:
  """Softmax attention over depth of each query; see api.attend."""
  values = jnp.stack([_wide(v) for v in sources])
  logits = _logits(queries, values, eps)  # [Q, R, ..., T]
  weights = jax.nn.softmax(logits, axis=1)
  largest = jax.lax.stop_gradient(jnp.max(logits, axis=1))
  sums = jnp.sum(jnp.exp(logits - largest[:, None]), axis=1)
  outs = jnp.einsum("qr...,r...d->q...d", weights, values, precision=HIGHEST)
  outs = outs.astype(sources[0].dtype)
  return tuple(
    Attended(*parts) for parts in zip(outs, largest, sums, strict=True)
  )


def merge(
  query: Float[Array, "D"],
  attended: Attended | None,
  recent: tuple[Float[Array, "... T D"], ...],
  update: Float[Array, "... T D"] | None,
  norm_scale: Float[Array, "D"] | None,
  options: MergeOptions,
) -> Merged:
  """One softmax over the finished part and the recent ones; see api.merge.

  The finished part is one source among the others: its value is out, and its
  logit max + log(sum).
  """
  recent = [_wide(v) for v in recent]
  total = None
  if update is not None:
    total = recent[-1] = recent[-1] + _wide(update)
  values, logits = [], []
  if attended is not None:
    largest = jax.lax.stop_gradient(attended.max)
    values.append(_wide(attended.out))
    logits.append(largest + jnp.log(attended.sum))
  for v in recent:
    values.append(v)
    logits.append(_logits(query[None], v, options.key_eps)[0])
  weights = jax.nn.softmax(jnp.stack(logits), axis=0)
  merged = jnp.sum(weights[..., None] * jnp.stack(values), axis=0)
  normed = merged
  if options.norm_eps is not None:
    normed = _rms_norm(merged, options.norm_eps)
    if norm_scale is not None:
      normed = normed * norm_scale
  return Merged(
    normed.astype(options.dtype),
    None if total is None else total.astype(options.total_dtype),
    merged.astype(options.dtype) if options.return_merged else None,
  )


def _wide(v):
  return v.astype(jnp.promote_types(v.dtype, jnp.float32))


def _rms_norm(v, eps):
  return v / jnp.sqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)


def _logits(queries, values, eps):
  """One logit per query and source: [Q, R, ..., T] of values [R, ..., T, D]."""
  keys = values if eps is None else _rms_norm(values, eps)
  return jnp.einsum("qd,...d->q...", queries, keys, precision=HIGHEST)
