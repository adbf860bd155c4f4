"""Phase 1 (`attend`) as TPU kernels: shapes, tiles, and the derivative."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnres_kernels.depth_attention import chips
from attnres_kernels.depth_attention import pallas_tpu_attend_kernel as kernel
from attnres_kernels.depth_attention.pallas_tpu_attend_kernel import (
  CHUNK,
  GROUP,
  LANES,
  num_parts,
  split,
)
from attnres_kernels.depth_attention.types import Attended

TILES = (128, 64, 32, 16)  # tokens per grid step; the scalars' lanes end at 128
MAX_QUERIES = 32  # per call: more are cut, and the sources read again
CORES = 2  # partial sums of the queries' derivative; a v5p has two cores
BLOCK = 10  # sources that the backward pass takes in one product


class Plan(NamedTuple):
  """How a kernel is cut.

  Attributes:
    tile: tokens per grid step.
    k_chunk: columns per product that sums over the width.
    n_chunk: columns per product that makes them.
    unroll: groups of tokens in flight (backward).
    vmem_bytes: what the blocks and scratch of a grid step take.
  """

  tile: int
  k_chunk: int
  n_chunk: int
  unroll: int
  vmem_bytes: int


def attend(queries, sources, eps):
  """Phase 1; see api.py."""
  dtype = sources[0].dtype
  if dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(
      f"got sources of {dtype}: the TPU kernels take bfloat16 and float32. Use"
      ' implementation="xla" or cast the sources.'
    )
  shape = sources[0].shape
  tokens = int(functools.reduce(lambda a, b: a * b, shape[:-1]))
  if not tokens * shape[-1]:
    raise ValueError(f"got sources of shape {shape}: expected no axis of 0.")
  flat = tuple(v.reshape(tokens, shape[-1]) for v in sources)
  results = []
  for i in range(0, queries.shape[0], MAX_QUERIES):
    outs, largest, total = _attend(queries[i : i + MAX_QUERIES], flat, eps)
    results += [
      Attended(o.reshape(shape), m.reshape(shape[:-1]), l.reshape(shape[:-1]))
      for o, m, l in zip(outs, largest, total, strict=True)
    ]
  return tuple(results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(queries, sources, eps):
  return _forward(queries, sources, eps, save=False)[0]


def _attend_fwd(queries, sources, eps):
  results, saved = _forward(queries, sources, eps, save=True)
  _, largest, total = results
  return results, (queries, sources, *saved, largest + jnp.log(total), total)


def _attend_bwd(eps, saved, cotangents):
  return _backward(saved, cotangents, eps)


_attend.defvjp(_attend_fwd, _attend_bwd)


def plan(
  direction: str, r: int, q: int, width: int, dtype, tokens: int
) -> Plan:
  """The tile of a kernel and its VMEM bytes.

  Args:
    direction: forward | backward.
    r: number of sources.
    q: number of queries.
    width: D.
    dtype: of the sources.
    tokens: T, all leading axes together.

  Raises:
    ValueError: not even the smallest tile fits the chip's VMEM.
  """
  dtype = jnp.dtype(dtype)
  info = chips.info()
  key = f"attend_{direction}:R={r}:Q={q}:D={width}:{dtype}"
  tuned = chips.tuned(key)
  k_chunk = tuned.get("k_chunk", 256)
  n_chunk = tuned.get("n_chunk", 256)
  budget = chips.vmem_budget()
  sizes = [tuned["tile"]] if "tile" in tuned else TILES
  for tile in sizes:
    if tile > max(GROUP, pl.next_power_of_2(tokens)) and tile != sizes[-1]:
      continue
    groups = tile // GROUP
    # Few queries are little work per group, next to the waits in it.
    few = 8 if direction == "forward" and q <= 8 else 4
    most = min(tuned.get("unroll", few), groups)
    unroll = max(u for u in range(1, most + 1) if groups % u == 0)
    used = _vmem_bytes(direction, r, q, width, dtype, tile, unroll)
    if used <= budget:
      return Plan(tile, k_chunk, n_chunk, unroll, used)
  raise ValueError(
    f"got {r} sources and {q} queries of width {width}, {dtype}: a tile of"
    f" {tile} tokens takes {used} bytes of VMEM, expected at most {budget} on"
    f" {info.chip_version.value}. Read fewer sources or queries at once"
    " (block_size, num_blocks, group_size), or use"
    ' implementation="xla".'
  )


def _vmem_bytes(direction, r, q, width, dtype, tile, unroll):
  item = dtype.itemsize
  lanes = -(-width // LANES) * LANES
  block = tile * lanes * item
  rows = _round(num_parts(dtype) * q, GROUP)
  total = 2 * rows * lanes * item  # query parts
  if direction == "forward":
    total += 2 * (r + q) * block  # sources and outputs, double-buffered
    total += 2 * 2 * _round(q, 8) * LANES * 4  # max and sum
    slots = tile // GROUP * -(-r // CHUNK)
    total += 2 * _round(slots, 8) * LANES * 4  # 1 / RMS
    total += 2 * slots * _round(q, 8) * LANES * 4  # logits
    # Left factors of the mix and products in flight.
    total += -(-r // CHUNK) * 2 * q * GROUP * LANES * item
    total += 4 * q * GROUP * 256 * 4
    return total
  span = _round(q * GROUP + rows, LANES)
  total += 2 * (2 * r + q) * block  # sources, cotangents, derivatives
  total += 2 * rows * lanes * 4  # derivative of the queries
  total += 2 * tile * _round(r, LANES) * 4  # 1 / RMS
  total += 2 * tile // GROUP * _round(r, 8) * span * 4  # logits
  total += 4 * _round(tile // GROUP, 8) * span * 4  # log-sum-exp, cotangent
  total += 2 * span * span * item  # gather
  # Products, weights and left factors of the groups in flight.
  total += unroll * r * GROUP * span * (3 * 4 + 2 * item)
  return total


def _round(x: int, unit: int) -> int:
  return -(-x // unit) * unit


def _pad(x, tile, axis=0):
  """Zeros up to a multiple of the tile: copies, and only ragged arrays."""
  missing = -x.shape[axis] % tile
  if not missing:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, missing)
  return jnp.pad(x, widths)


def _bytes(*arrays) -> int:
  """HBM bytes of arrays that move once, as they lie there: in tiles of 8 rows
  and 128 columns."""
  total = 0
  for x in arrays:
    *lead, rows, columns = x.shape
    size = _round(rows, 8) * _round(columns, LANES) * x.dtype.itemsize
    total += functools.reduce(lambda a, b: a * b, lead, size)
  return total


def _params(semantics):
  return pltpu.CompilerParams(
    dimension_semantics=semantics, vmem_limit_bytes=_vmem_limit()
  )


def _vmem_limit() -> int:
  return int(0.95 * chips.info().vmem_capacity_bytes)


def _query_parts(queries, dtype):
  """The parts of the queries, made outside of the kernel."""
  rounded = functools.partial(
    jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7
  )
  return split(queries, dtype, num_parts(dtype), rounded)


def _pair_rows(queries, dtype):
  """[C, D]: one row per query and product in u c, to 16 bits of each factor:
  u_high c_high, u_high c_middle, u_low c_high. Rows are padded to a tile."""
  parts = _query_parts(queries, dtype)
  if dtype == jnp.bfloat16:
    parts = [parts[0], parts[1], parts[0]]
  return _pad(jnp.concatenate(parts, axis=0), GROUP)


def _forward(queries, sources, eps, save):
  tokens, width = sources[0].shape
  dtype = sources[0].dtype
  r, q = len(sources), queries.shape[0]
  cut = plan("forward", r, q, width, dtype, tokens)
  sources = [_pad(v, cut.tile) for v in sources]
  steps = sources[0].shape[0] // cut.tile
  # Every part starts at a row that is a multiple of 8.
  padded = _pad(queries, GROUP if dtype == jnp.bfloat16 else 8)
  parts = jnp.concatenate(_query_parts(padded, dtype), axis=0)
  by_token = pl.BlockSpec((cut.tile, width), lambda i: (i, 0))
  scalars = pl.BlockSpec((1, q, cut.tile), lambda i: (i, 0, 0))
  scalar_shape = jax.ShapeDtypeStruct((steps, q, cut.tile), jnp.float32)
  out_specs = [by_token] * q + [scalars] * 2
  out_shape = [jax.ShapeDtypeStruct((steps * cut.tile, width), dtype)] * q
  out_shape += [scalar_shape] * 2
  if save:
    rows = cut.tile // GROUP * -(-r // CHUNK)
    for block in ((rows, LANES), (rows, q, LANES)):  # inverse RMS, logits
      zeros = (0,) * len(block)
      out_specs.append(pl.BlockSpec((1, *block), lambda i, z=zeros: (i, *z)))
      out_shape.append(jax.ShapeDtypeStruct((steps, *block), jnp.float32))
  results = pl.pallas_call(
    functools.partial(
      kernel.forward,
      num_sources=r,
      num_queries=q,
      eps=eps,
      k_chunk=cut.k_chunk,
      n_chunk=cut.n_chunk,
      unroll=cut.unroll,
      per_pass=chips.info().mxu_column_size // GROUP,
    ),
    grid=(steps,),
    in_specs=[pl.BlockSpec(parts.shape, lambda i: (0, 0))] + [by_token] * r,
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=_params(("parallel",)),
    cost_estimate=pl.CostEstimate(
      flops=4 * r * q * sources[0].size,
      transcendentals=r * q * sources[0].shape[0],
      bytes_accessed=_bytes(parts, *sources, *out_shape),
    ),
    interpret=chips.interpret_mode(),
    name="attnres_attend_forward",
  )(parts, *sources)
  outs, (largest, total, *saved) = results[:q], results[q:]
  largest, total = (
    x.transpose(1, 0, 2).reshape(q, -1)[:, :tokens] for x in (largest, total)
  )
  if save:  # [groups, chunks, .., (r, t)], as they are
    groups = _round(tokens, GROUP) // GROUP
    saved = [
      x.reshape(-1, -(-r // CHUNK), *x.shape[2:])[:groups] for x in saved
    ]
  return ([x[:tokens] for x in outs], largest, total), saved


def _backward(saved, cotangents, eps):
  queries, sources, inverse, scores, lse, total = saved
  d_outs, _, d_total = cotangents  # the shift carries no derivative
  tokens, width = sources[0].shape
  dtype = sources[0].dtype
  r, q = len(sources), queries.shape[0]
  cut = plan("backward", r, q, width, dtype, tokens)
  tile = cut.tile
  cores = 1 if -(-tokens // tile) % CORES else CORES
  sources = [_pad(v, tile) for v in sources]
  d_outs = [_pad(d, tile) for d in d_outs]
  steps = sources[0].shape[0] // tile // cores
  pairs = _pair_rows(queries, dtype)
  count, lanes = pairs.shape[0], q * GROUP
  first = lanes // LANES * LANES
  # Lane (q, t) goes to the lane of every part of query q.
  column = jnp.arange(first, lanes + count) - lanes
  part_of = jnp.where((column >= 0) & (column < num_parts(dtype) * q),
                      column % q, -1)  # fmt: skip
  gather = jnp.arange(lanes)[:, None] // GROUP == part_of[None, :]
  gather = gather.astype(dtype)

  def by_source(x):  # [groups, chunks, .., (r, t)] -> [groups, R, .., t]
    x = _pad(x, tile // GROUP)
    x = jnp.moveaxis(x.reshape(*x.shape[:-1], CHUNK, GROUP), -2, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :r]

  def by_query(x):  # [Q, T] -> [groups, Q, t]
    x = _pad(x.T, tile).reshape(-1, GROUP, q)
    return jnp.moveaxis(x, 1, 2)

  def stepwise(x):  # [groups, .., Q, t] -> [steps, groups, .., (q, t)]
    return x.reshape(-1, tile // GROUP, *x.shape[1:-2], lanes)

  inverse = jnp.moveaxis(by_source(inverse), 1, 2).reshape(-1, r)
  scores = stepwise(by_source(scores))
  # sum is exp(lse - max) with the shift held fixed.
  lse, d_lse = (stepwise(by_query(x)) for x in (lse, d_total * total))

  def fixed(x):
    return pl.BlockSpec(x.shape, lambda i, j: (0, 0))

  def by_step(x):
    zeros = (0,) * (x.ndim - 1)
    return pl.BlockSpec((1, *x.shape[1:]), lambda i, j: (i * steps + j, *zeros))

  by_token = pl.BlockSpec((tile, width), lambda i, j: (i * steps + j, 0))
  operands = (pairs, gather, inverse, scores, lse, d_lse, *sources, *d_outs)
  out_shape = [jax.ShapeDtypeStruct(sources[0].shape, dtype)] * r
  out_shape.append(jax.ShapeDtypeStruct((cores, count, width), jnp.float32))
  *d_sources, d_pairs = pl.pallas_call(
    functools.partial(
      kernel.backward,
      num_sources=r,
      num_queries=q,
      eps=eps,
      k_chunk=cut.k_chunk,
      n_chunk=cut.n_chunk,
      unroll=cut.unroll,
      block=r if r <= BLOCK else CHUNK,
    ),
    grid=(cores, steps),
    in_specs=[
      fixed(pairs),
      fixed(gather),
      pl.BlockSpec((tile, r), lambda i, j: (i * steps + j, 0)),
      *(by_step(x) for x in (scores, lse, d_lse)),
      *[by_token] * (r + q),
    ],
    out_specs=[by_token] * r
    + [pl.BlockSpec((1, count, width), lambda i, j: (i, 0, 0))],
    out_shape=out_shape,
    compiler_params=_params(("parallel", "arbitrary")),
    cost_estimate=pl.CostEstimate(
      flops=10 * r * q * sources[0].size,
      transcendentals=r * q * sources[0].shape[0],
      bytes_accessed=_bytes(*operands, *out_shape),
    ),
    interpret=chips.interpret_mode(),
    name="attnres_attend_backward",
  )(*operands)
  d_pairs = d_pairs.sum(0)
  d_queries = d_pairs[:q]  # high part times the sources
  if dtype == jnp.bfloat16:
    d_queries = d_queries + d_pairs[2 * q : 3 * q]  # low part
  return d_queries, tuple(d[:tokens] for d in d_sources)
