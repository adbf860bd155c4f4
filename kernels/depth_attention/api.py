"""Attention over depth in two phases: `attend`, then `merge`.

Every token attends over R sources, the outputs of earlier layers, with queries
that do not depend on the token. For query w with key-norm scale g

  logit_r = (w * g) . v_r / RMS(v_r)        p = softmax over r
  out     = sum_r p_r v_r                   (raw sources, not the keys)

Phase 1 (`attend`) reads the finished sources once for all queries of a block.
Phase 2 (`merge`) joins one query's result with what has come since, by online
softmax, adds the sublayer's output to the running sum and norms the mixture
for the next sublayer, in one pass. Both are exact: cut the sources anywhere,
the result is that of one softmax (arXiv:2603.15031, Algorithm 1).

Implementations:
  reference   one literal equation per line; the oracle of the tests
  xla         plain JAX with a derivative of its own; every platform
  pallas_tpu  TPU kernels
"""

import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnres_kernels.depth_attention import (
  chips,
  pallas_tpu,
  reference,
  xla,
)
from attnres_kernels.depth_attention.types import (
  Attended,
  Merged,
  MergeOptions,
)

IMPLEMENTATIONS = {
  "reference": reference,
  "xla": xla,
  "pallas_tpu": pallas_tpu,
}


def attend(
  queries: Float[Array, "Q D"],
  sources: Sequence[Float[Array, "... T D"]],
  *,
  scales: Float[Array, "Q D"] | None = None,
  eps: float | None,
  implementation: str | None = None,
) -> tuple[Attended, ...]:
  """Phase 1: Q queries over the same R sources.

  Args:
    queries: Q >= 1 pseudo-queries, float32.
    sources: R >= 1 arrays of one shape and dtype, each an array of its own;
      bfloat16 or float32. T and D may be any size.
    scales: key-norm scale of each query, float32; None: all ones.
    eps: added to the mean square of the key norm; None: keys are the raw
      sources (no norm).
    implementation: a name of IMPLEMENTATIONS, which then runs or raises; None
      takes pallas_tpu if the mesh in use (`jax.set_mesh`), or else the default
      device, is a TPU, and xla elsewhere.

  Returns:
    One `Attended` per query. Differentiable in queries, scales and sources.

  Raises:
    ValueError: shapes or dtypes that do not fit each other, no source, an
      unknown implementation.
    NotImplementedError: the named implementation cannot do this.
  """
  sources = tuple(sources)
  _check_sources("sources", sources)
  if not sources:
    raise ValueError(
      "got no sources: expected at least one array; the embedding is always"
      " a source."
    )
  width = sources[0].shape[-1]
  if queries.ndim != 2 or queries.shape[0] < 1 or queries.shape[1] != width:
    raise ValueError(
      f"got queries of shape {queries.shape}: expected [Q, {width}] with"
      " Q >= 1 and the width of the sources."
    )
  module = _choose(implementation, "attend", sources[0].dtype)
  return module.attend(_scaled(queries, scales), sources, eps)


def merge(
  query: Float[Array, "D"],
  attended: Attended | None,
  recent: Sequence[Float[Array, "... T D"]],
  update: Float[Array, "... T D"] | None = None,
  *,
  scale: Float[Array, "D"] | None = None,
  eps: float | None,
  norm_scale: Float[Array, "D"] | None = None,
  norm_eps: float | None = None,
  total_dtype=jnp.float32,
  return_merged: bool = False,
  implementation: str | None = None,
) -> Merged:
  """Phase 2: joins one query's finished part with the recent sources.

  With an update, the last recent source is the running sum of a block:
  total = recent[-1] + update takes its place among the sources.

  Args:
    query: the pseudo-query, float32.
    attended: phase 1's result for this query; None: it had no sources.
    recent: K >= 0 further sources of one shape; dtypes may differ.
    update: what the last sublayer returned; needs K >= 1.
    scale: key-norm scale, float32; None: ones.
    eps: as in `attend`.
    norm_scale: scale of the RMSNorm behind the mixture, float32; None: ones.
    norm_eps: eps of that norm; None: no norm, `normed` is the mixture.
    total_dtype: dtype of `total`; the arithmetic is float32 in any case.
    return_merged: also returns the mixture before the norm. It costs a write.
    implementation: as in `attend`.

  Returns:
    `Merged`; `normed` and `merged` have the dtype of attended.out, without it
    that of the update or of the last recent source.

  Raises:
    ValueError, NotImplementedError: as in `attend`; both parts empty.
  """
  recent = tuple(recent)
  arrays = (
    *(() if attended is None else (attended.out,)),
    *recent,
    *(() if update is None else (update,)),
  )
  _check_sources("attended.out, recent and update", arrays, one_dtype=False)
  if not arrays or (update is not None and not recent):
    raise ValueError(
      f"got {len(recent)} recent sources, attended"
      f" {'absent' if attended is None else 'present'}, update"
      f" {'absent' if update is None else 'present'}: expected a finished part"
      " or a recent source, and an update only on top of a recent source."
    )
  width = arrays[0].shape[-1]
  for name, vector in (("query", query), ("norm_scale", norm_scale)):
    if vector is not None and vector.shape != (width,):
      raise ValueError(
        f"got {name} of shape {vector.shape}: expected ({width},), the width"
        " of the sources."
      )
  if not recent and norm_eps is None:  # nothing to do: no pass over memory
    return Merged(attended.out, None, attended.out if return_merged else None)
  dtype = arrays[0 if attended is not None else -1].dtype
  options = MergeOptions(
    eps, norm_eps, jnp.dtype(dtype), jnp.dtype(total_dtype), return_merged
  )
  module = _choose(implementation, "merge", dtype)
  return module.merge(
    _scaled(query, scale), attended, recent, update, norm_scale, options
  )


def _scaled(query, scale):
  """w * g: the two only ever meet as their product."""
  query = query.astype(jnp.float32)
  if scale is None:
    return query
  if scale.shape != query.shape:
    raise ValueError(
      f"got scales of shape {scale.shape}: expected {query.shape}, the shape"
      " of the queries."
    )
  return query * scale.astype(jnp.float32)


def _check_sources(what, arrays, one_dtype=True):
  for i, v in enumerate(arrays):
    if v.ndim < 2 or v.shape != arrays[0].shape:
      raise ValueError(
        f"got {what} of shapes {[a.shape for a in arrays]}: expected one"
        f" shape [..., T, D]; number {i} differs."
      )
    if one_dtype and v.dtype != arrays[0].dtype:
      raise ValueError(
        f"got {what} of dtypes {[str(a.dtype) for a in arrays]}: expected one"
        " dtype; cast them before the call."
      )
    if not jnp.issubdtype(v.dtype, jnp.floating):
      raise ValueError(f"got {what} of dtype {v.dtype}: expected floating.")


def _choose(name, op, dtype):
  if name is None:
    name, why = _default(op, jnp.dtype(dtype))
    _log_once(op, name, why)
  elif name not in IMPLEMENTATIONS:
    raise ValueError(
      f"got implementation {name!r}: expected None or one of"
      f" {', '.join(IMPLEMENTATIONS)}."
    )
  return IMPLEMENTATIONS[name]


def _default(op, dtype):
  kind = chips.device_kind()
  if kind is None:
    return "xla", f"the platform is {jax.default_backend()}"
  if dtype not in pallas_tpu.DTYPES:
    return "xla", f"the TPU kernels do not take {dtype}"
  return "pallas_tpu", f"the device is a {kind}"


@functools.cache
def _log_once(op, name, why):
  logging.getLogger(__name__).info(
    "depth attention, %s: implementation %s (%s)", op, name, why
  )
