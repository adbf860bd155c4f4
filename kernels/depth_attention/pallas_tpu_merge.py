"""Phase 2 (`merge`) as TPU kernels, forward and backward.

Each is one pass over the tokens. In the Block case the forward reads the
running sum, the update and attended.out and writes the total and the normed
mixture. For the backward it keeps its inputs and the total, which are alive
anyway, and a few numbers per token; the total is never restored by
subtraction. What is read, written and cut into tiles stands in
pallas_tpu_merge_plan.py, the arithmetic in pallas_tpu_merge_kernel.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnres_kernels.depth_attention import chips
from attnres_kernels.depth_attention import pallas_tpu_merge_kernel as kernel
from attnres_kernels.depth_attention.pallas_tpu_merge_plan import (
  F32,
  Case,
  buffers,
  has_scratch,
  merge_tile,
)
from attnres_kernels.depth_attention.types import Attended, Merged

DTYPES = (jnp.dtype(jnp.bfloat16), F32)
# VMEM that the compiler takes besides the blocks, for spilled registers.
SPILL_BYTES = 8 << 20


def merge(query, attended, recent, update, norm_scale, options) -> Merged:
  """See api.merge; `query` is the pseudo-query times the key-norm scale.

  Raises:
    NotImplementedError: a dtype other than bfloat16 and float32.
    ValueError: not even the smallest tile fits into VMEM.
  """
  arrays = [
    *(() if attended is None else (attended.out,)),
    *recent,
    *(() if update is None else (update,)),
  ]
  for dtype in (*(x.dtype for x in arrays), options.dtype, options.total_dtype):
    if dtype not in DTYPES:
      raise NotImplementedError(
        f"got dtype {dtype}: the TPU kernels of merge take bfloat16 and"
        ' float32; expected implementation="xla" for any other.'
      )
  shape = arrays[0].shape
  case = Case(
    tokens=math.prod(shape[:-1]),
    width=shape[-1],
    attended=None if attended is None else attended.out.dtype,
    recent=tuple(x.dtype for x in recent),
    update=None if update is None else update.dtype,
    norm_scale=norm_scale is not None,
    options=options,
  )
  flat = functools.partial(jnp.reshape, shape=(case.tokens, case.width))
  if attended is not None:
    attended = Attended(
      flat(attended.out),
      attended.max.astype(F32).reshape(-1),
      attended.sum.astype(F32).reshape(-1),
    )
  merged = _merge(
    case,
    query.astype(F32),
    attended,
    tuple(flat(x) for x in recent),
    None if update is None else flat(update),
    None if norm_scale is None else norm_scale.astype(F32),
  )
  return jax.tree.map(lambda x: x.reshape(shape), merged)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merge(case, query, attended, recent, update, norm_scale):
  arrays = query, attended, recent, update, norm_scale
  return _forward(case, False, *arrays)[0]


def _forward(case, save, query, attended, recent, update, norm_scale):
  operands = dict(
    query=query, recent=recent, update=update, norm_scale=norm_scale
  )
  outs = _call(case, "forward", operands | _fields(attended), save)
  normed, merged = outs["normed"], outs.get("merged")
  if case.options.return_merged and merged is None:
    merged = normed  # There is no norm.
  return Merged(normed, outs.get("total"), merged), outs.get("saved")


def _merge_forward(case, query, attended, recent, update, norm_scale):
  arrays = query, attended, recent, update, norm_scale
  merged, saved = _forward(case, True, *arrays)
  if update is not None:
    recent = *recent[:-1], merged.total
  return merged, (query, attended, recent, norm_scale, saved)


def _merge_backward(case, residuals, cotangents):
  query, attended, recent, norm_scale, saved = residuals
  operands = dict(
    query=query, recent=recent, norm_scale=norm_scale, saved=saved
  )
  operands |= {f"d_{name}": x for name, x in _fields(cotangents).items()}
  outs = _call(case, "backward", operands | _fields(attended))

  def vector(name, like):
    if name not in outs:
      return None if like is None else jnp.zeros_like(like)
    return outs[name].sum((0, 1))[: case.width]

  d_attended = d_update = None
  if attended is not None:
    # attended.max is a shift: it has no gradient.
    d_max = d_sum = jnp.zeros_like(attended.max)
    if "d_sum" in outs:
      d_sum = outs["d_sum"].reshape(-1)[: case.tokens]
    d_attended = Attended(outs["d_out"], d_max, d_sum)
  if case.update is not None:
    d_update = outs.get("d_update", outs["d_recent"][-1])
  return (
    vector("d_query", query),
    d_attended,
    outs["d_recent"],
    d_update,
    vector("d_norm_scale", norm_scale),
  )


_merge.defvjp(_merge_forward, _merge_backward)


def _fields(named):
  return {} if named is None else named._asdict()


def _call(case, direction, operands, save=True):
  """Runs a kernel on what it takes of `operands`; returns a dict of results."""
  ins, outs = buffers(case, direction, save)
  plan = merge_tile(case, direction, save)

  def tile(part, step):
    return jnp.minimum(part * plan.steps + step, plan.tiles - 1)

  def spec(b):
    block, index = {
      "tokens": ((plan.tile, plan.padded), lambda p, s: (tile(p, s), 0)),
      "vector": ((1, plan.padded), lambda p, s: (0, 0)),
      "lanes": ((None, b.rows, plan.tile), lambda p, s: (tile(p, s), 0, 0)),
      "sums": ((None, b.rows, plan.padded), lambda p, s: (p, 0, 0)),
    }[b.kind]
    return pl.BlockSpec(block, index)

  def shape(b):
    dims = {
      "tokens": (case.tokens, case.width),
      "lanes": (plan.tiles, b.rows, plan.tile),
      "sums": (plan.parts, b.rows, plan.padded),
    }[b.kind]
    return jax.ShapeDtypeStruct(dims, b.dtype)

  def lay_out(b, x):
    if b.kind == "vector":
      return x[None]
    if b.kind == "lanes" and x.ndim == 1:
      x = jnp.pad(x, (0, plan.tiles * plan.tile - case.tokens))
      return x.reshape(plan.tiles, 1, plan.tile)
    return x

  facts = kernel.Spec(
    width=case.width,
    tokens=case.tokens,
    tile=plan.tile,
    rows=plan.rows,
    weighted=case.weighted,
    saved=case.saved,
    key_eps=case.options.key_eps,
    norm_eps=case.options.norm_eps,
  )
  sources = len(case.recent) + (case.attended is not None)
  forward = direction == "forward"
  # Per element of D; counted in the bodies, of the usual options.
  operations = 8 * sources + 6 if forward else 14 * sources + 10
  call = pl.pallas_call(
    functools.partial(kernel.forward if forward else kernel.backward, facts),
    grid=(plan.parts, plan.steps),
    in_specs=(jax.tree.map(spec, ins),),
    out_specs=jax.tree.map(spec, outs),
    out_shape=jax.tree.map(shape, outs),
    scratch_shapes=[pltpu.VMEM((plan.rows, plan.padded), F32)]
    if has_scratch(case, direction)
    else [],
    compiler_params=pltpu.CompilerParams(
      # A part per core; a core adds up sums over tokens step by step.
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=min(
        plan.vmem_bytes + SPILL_BYTES, chips.info().vmem_capacity_bytes
      ),
    ),
    cost_estimate=pl.CostEstimate(
      flops=operations * case.tokens * case.width,
      transcendentals=(2 * sources + 1) * case.tokens,
      bytes_accessed=plan.step_bytes * plan.tiles,
    ),
    interpret=chips.interpret_mode(),
    name=f"attnres_merge_{direction}",
  )
  operands = {name: operands[name] for name in ins}
  return call(jax.tree.map(lay_out, ins, operands))
