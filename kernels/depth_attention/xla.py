"""Plain JAX with derivatives of its own: the path of every platform but a TPU.

Saved for the backward pass are operands, results and per-token scalars, never
a key or a stack of sources. With v a source, n = 1 / RMS(v), c = w * g a query,
l = n (c . v) its logit and p its weight, the derivatives are

  dl  = p (d_out . v - d_out . out)           (+ p sum d_sum in phase 1)
  d v = sum_q p_q d_out_q + sum_q dl_q n c_q - (sum_q dl_q l_q) n^2 v / D
  d c = sum over sources and tokens of dl n v
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float

from attnres_kernels.depth_attention.types import (
  Attended,
  Merged,
  MergeOptions,
)

HIGHEST = jax.lax.Precision.HIGHEST  # logits: a TPU's default is too coarse


def attend(
  queries: Float[Array, "Q D"],
  sources: tuple[Float[Array, "... T D"], ...],
  eps: float | None,
) -> tuple[Attended, ...]:
  """Phase 1; see api.attend. `queries` are w * g."""
  return _attend(queries, tuple(sources), eps)


def merge(
  query: Float[Array, "D"],
  attended: Attended | None,
  recent: tuple[Float[Array, "... T D"], ...],
  update: Float[Array, "... T D"] | None,
  norm_scale: Float[Array, "D"] | None,
  options: MergeOptions,
) -> Merged:
  """Phase 2; see api.merge. `query` is w * g."""
  recent = tuple(recent)
  dtypes = (
    tuple(v.dtype for v in recent), None if update is None else update.dtype
  )  # fmt: skip
  return _merge(query, attended, recent, update, norm_scale, options, dtypes)


def not_inlined(*static):
  """Compiles a function as one call whose operands and results are arrays.

  XLA on CPU drops optimization barriers and then fuses every producer into all
  of its consumers: a cotangent, with the norm behind it, would be computed once
  per source that it reaches. A call that stays a call ends that. Elsewhere a
  call would only split fusions (on a TPU: 1.3 times the bytes of `attend`'s
  derivative), and there is none.

  Args:
    static: names of the keyword arguments, which are not arrays.
  """

  def wrap(function):
    jitted = jax.jit(function, static_argnames=static)

    @functools.wraps(function)
    def call(*arrays, **constants):
      def on_cpu(*arrays):
        with set_xla_metadata(inlineable="false"):
          return jitted(*arrays, **constants)

      elsewhere = functools.partial(jitted, **constants)
      return jax.lax.platform_dependent(*arrays, cpu=on_cpu, default=elsewhere)

    return call

  return wrap


# Phase 1. Scalars per token are [R, ..., T, Q], or [R, ..., T] without a query.
# Every source is a call of its own: bfloat16 ones need a float32 copy on a CPU,
# and this way there is one at a time.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(queries, sources, eps):
  return _attend_forward(queries, sources, eps)[0]


def _attend_forward(queries, sources, eps):
  scores = [_score(queries, v, eps=eps) for v in sources]
  logits = jnp.stack([logit for logit, _ in scores])
  inverse = [n for _, n in scores]
  attended, weights = _average(logits, sources)
  sums = tuple(a.sum for a in attended)
  return attended, (queries, sources, logits, inverse, weights, sums)


def _attend_backward(eps, saved, d_attended):
  del eps
  queries, sources, logits, inverse, weights, sums = saved
  d_outs = tuple(d.out for d in d_attended)
  d_sums = tuple(d.sum for d in d_attended)
  d_weights = jnp.stack([_dots(d_outs, v) for v in sources])
  d_logits = _d_logits(weights, d_weights, sums, d_sums)
  d_queries, d_sources = 0, []
  for r, v in enumerate(sources):
    scalars = weights[r], d_logits[r], logits[r], inverse[r]
    d_c, d_v = _d_source(queries, v, d_outs, *scalars)
    d_queries += d_c
    d_sources.append(d_v)
  return d_queries.astype(queries.dtype), tuple(d_sources)


_attend.defvjp(_attend_forward, _attend_backward)


@not_inlined("eps")
def _score(queries, v, *, eps):
  """Logits [..., T, Q] of a source, and its 1 / RMS (None without a norm)."""
  v = _wide(v)
  dots = jnp.einsum("...td,qd->...tq", v, queries, precision=HIGHEST)
  if eps is None:
    return dots, None
  n = _inverse_rms(v, eps)
  return dots * n[..., None], n


@not_inlined()
def _average(logits, sources):
  """(Attended of each query, weights)."""
  largest = logits.max(0)
  weights = jnp.exp(logits - largest)
  sums = weights.sum(0)
  weights = weights / sums
  outs = [
    sum(_times(w[..., q], v) for w, v in zip(weights, sources, strict=True))
    for q in range(logits.shape[-1])
  ]
  dtype = sources[0].dtype
  attended = tuple(
    Attended(out.astype(dtype), largest[..., q], sums[..., q])
    for q, out in enumerate(outs)
  )
  return attended, weights


@not_inlined()
def _dots(d_outs, v):
  """Derivatives [..., T, Q] of a source's weights."""
  return jnp.stack([_dot(d, v) for d in d_outs], -1)


@not_inlined()
def _d_logits(weights, d_weights, sums, d_sums):
  pairs = zip(sums, d_sums, strict=True)
  d_log_sums = jnp.stack([s * d for s, d in pairs], -1)
  return _through_softmax(weights, d_weights) + weights * d_log_sums


@not_inlined()
def _d_source(queries, v, d_outs, weights, d_logits, logits, inverse):
  """One source's part of the queries' cotangents, and its own."""
  d_dots = d_logits if inverse is None else d_logits * inverse[..., None]
  d_queries = jnp.einsum("...tq,...td->qd", d_dots, _wide(v), precision=HIGHEST)
  d = _d_through_logits(queries, v, d_logits, logits, inverse)
  for q, d_out in enumerate(d_outs):
    d = d + _times(weights[..., q], d_out)
  return d_queries, d.astype(v.dtype)


def _through_softmax(weights, d_weights):
  """p (d - sum p d), sums over axis 0.

  Over the sources it sums to 0. What rounding leaves instead is multiplied by
  the part that all sources share, in the derivative of the query. Centred
  twice, the second sum is small, and so is its rounding.
  """
  d_weights = d_weights - (weights * d_weights).sum(0)
  return weights * (d_weights - (weights * d_weights).sum(0))


def _d_through_logits(queries, v, d_logits, logits, inverse):
  """What a source gets because its key makes logits."""
  d_dots = d_logits if inverse is None else d_logits * inverse[..., None]
  d = sum(d_dots[..., q, None] * c for q, c in enumerate(queries))
  if inverse is None:
    return d
  radial = (d_logits * logits).sum(-1) * inverse * inverse / v.shape[-1]
  return d - _times(radial, v)


# Phase 2. The finished part is one more source, of logit max + log(sum).


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _merge(query, attended, recent, update, norm_scale, options, dtypes):
  args = query, attended, recent, update, norm_scale
  return _merge_forward(*args, options, dtypes)[0]


def _merge_forward(
  query, attended, recent, update, norm_scale, options, dtypes
):
  del dtypes
  merged, scalars = _join(
    query, attended, recent, update, norm_scale, options=options
  )
  # What the last recent source is the sum of. The total, where nothing of it
  # was rounded away: the next merge keeps it anyway.
  parts = recent[-1:]
  if update is not None:
    exact = merged.total.dtype == _wide(merged.total).dtype
    parts = (merged.total,) if exact else (recent[-1], update)
  saved = query, attended, recent[:-1], parts, norm_scale, scalars
  return merged, saved


def _merge_backward(options, dtypes, saved, d_merged):
  attended = saved[1]
  d_query, d_out, d_sum, d_recent, d_update, d_norm_scale = _d_join(
    *saved, d_merged, options=options, dtypes=dtypes
  )
  d_attended = None
  if attended is not None:
    d_attended = Attended(d_out, jnp.zeros_like(attended.max), d_sum)
  return d_query, d_attended, d_recent, d_update, d_norm_scale


_merge.defvjp(_merge_forward, _merge_backward)


@not_inlined("options")
def _join(query, attended, recent, update, norm_scale, *, options):
  """(Merged, per-token scalars that the backward pass wants)."""
  values = [_wide(v) for v in recent]
  total = None
  if update is not None:
    total = values[-1] = values[-1] + _wide(update)
  logits, inverse = [], []
  for v in values:
    logit = _dot(v, query)
    if options.key_eps is not None:
      inverse.append(_inverse_rms(v, options.key_eps))
      logit = logit * inverse[-1]
    logits.append(logit)
  shifts = logits
  if attended is not None:
    values = [_wide(attended.out), *values]
    shifts = [attended.max, *logits]
  largest = functools.reduce(jnp.maximum, shifts)
  weights = [jnp.exp(s - largest) for s in shifts]
  if attended is not None:
    weights[0] = weights[0] * attended.sum
  denominator = sum(weights)
  weights = [w / denominator for w in weights]
  h = sum(_times(w, v) for w, v in zip(weights, values, strict=True))
  normed, norm_inverse = h, None
  if options.norm_eps is not None:
    norm_inverse = _inverse_rms(h, options.norm_eps)
    normed = _times(norm_inverse, h)
    if norm_scale is not None:
      normed = normed * norm_scale
  merged = Merged(
    normed.astype(options.dtype),
    None if total is None else total.astype(options.total_dtype),
    h.astype(options.dtype) if options.return_merged else None,
  )
  return merged, (logits, inverse, weights, norm_inverse)


@not_inlined("options", "dtypes")
def _d_join(
  query,
  attended,
  recent,
  parts,
  norm_scale,
  scalars,
  d_merged,
  *,
  options,
  dtypes,
):
  """Cotangents of query, out, sum, recent sources, update and norm_scale."""
  logits, inverse, weights, norm_inverse = scalars
  recent = [_wide(v) for v in recent]
  if parts:
    recent.append(sum(_wide(part) for part in parts))
  values = recent
  if attended is not None:
    values = [_wide(attended.out), *recent]
  h = sum(_times(w, v) for w, v in zip(weights, values, strict=True))
  d_h, d_norm_scale = _d_norm(h, norm_inverse, norm_scale, d_merged.normed)
  if options.return_merged:
    d_h = d_h + _wide(d_merged.merged)
  weights = jnp.stack(weights)
  d_weights = jnp.stack([_dot(d_h, v) for v in values])
  d_logits = list(_through_softmax(weights, d_weights))
  d_values = [_times(w, d_h) for w in weights]
  d_out = d_sum = None
  if attended is not None:
    d_out = d_values.pop(0).astype(attended.out.dtype)
    d_sum = d_logits.pop(0) / attended.sum
  d_query = jnp.zeros_like(query)
  for k, v in enumerate(recent):
    n = inverse[k] if inverse else None
    d_dots = d_logits[k] if n is None else d_logits[k] * n
    d_query += _over_tokens(d_dots, v)
    d_values[k] += _d_through_logits(
      query[None], v, d_logits[k][..., None], logits[k][..., None], n
    )
  if d_merged.total is not None:
    d_values[-1] += _wide(d_merged.total)
  # In their dtypes already here: what leaves a call is written.
  recent_dtypes, update_dtype = dtypes
  d_recent = tuple(
    d.astype(dtype) for d, dtype in zip(d_values, recent_dtypes, strict=True)
  )
  d_update = None
  if update_dtype is not None:
    d_update = d_values[-1].astype(update_dtype)
  return d_query, d_out, d_sum, d_recent, d_update, d_norm_scale


def _d_norm(h, inverse, scale, d_normed):
  """Cotangents of the mixture and of the norm's scale."""
  d_normed = _wide(d_normed)
  if inverse is None:
    return d_normed, None if scale is None else jnp.zeros_like(scale)
  # Both sums are matmuls on one product: as sums over a tensor of three
  # factors each, XLA on CPU writes two more arrays of the mixture's size.
  product = d_normed * h
  if scale is None:
    d_scale, radial = None, product.sum(-1)
  else:
    d_scale = _over_tokens(inverse, product)
    radial = jnp.einsum("...d,d->...", product, scale, precision=HIGHEST)
    d_normed = d_normed * scale
  radial = radial * inverse**3 / h.shape[-1]
  return _times(inverse, d_normed) - _times(radial, h), d_scale


def _over_tokens(weight, v):
  """[D]: the sum of weight * v over tokens, as a matmul."""
  return jnp.einsum("...t,...td->d", weight, v, precision=HIGHEST)


def _wide(v):
  return v.astype(jnp.promote_types(v.dtype, jnp.float32))


def _times(weight, v):
  return weight[..., None] * _wide(v)


def _dot(a, b):
  return jnp.sum(_wide(a) * _wide(b), axis=-1)


def _inverse_rms(v, eps):
  return jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
