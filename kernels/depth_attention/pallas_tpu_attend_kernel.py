"""Kernel bodies of phase 1: block-diagonal matrix products over depth.

A query weighs every token's sources by itself, which is a matrix product only
token by token. Here GROUP tokens make one: with the sources of a group as rows
(r, t) and the queries as rows (q, t), the weights are a matrix that is zero
unless both t agree. All but 1 / GROUP of the products are with zeros, and the
matrix unit is still several times faster at it than the vector unit is at the
few products that count.

Letters as elsewhere; a letter pair such as RG is one axis, r major. Weights
and queries are float32 values: for bfloat16 sources they enter the matrix unit
as sums of bfloat16 parts, which loses nothing that float32 would keep.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnres_kernels.depth_attention import chips

GROUP = 16  # tokens per block of a block-diagonal product: a bfloat16 tile
LANES = 128
CHUNK = LANES // GROUP  # sources whose rows fill one tile of the matrix unit
MASKED = -1e30  # logit of a slot without a source

NN = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))


def num_parts(dtype) -> int:
  """How many arrays of this dtype carry a float32 value, about."""
  return 3 if dtype == jnp.bfloat16 else 1


def _rounded(x):
  """x rounded to bfloat16, as float32."""
  # XLA takes a cast to bfloat16 and back for nothing, which would leave
  # nothing for the other parts; the kernel compiler has no reduce_precision.
  if chips.interpret_mode():
    return lax.reduce_precision(x, 8, 7)
  return x.astype(jnp.bfloat16).astype(jnp.float32)


def split(x, dtype, parts, rounded=_rounded):
  """float32 -> arrays of the dtype that sum to it, 8 bits or more in each."""
  if dtype != jnp.bfloat16:
    return [x]
  result = []
  for _ in range(parts):
    part = rounded(x)
    result.append(part.astype(jnp.bfloat16))
    x = x - part
  return result


def dot(a, b, dims=NN):
  """Matrix product with float32 accumulation, exact inputs."""
  exact = a.dtype == jnp.float32 or b.dtype == jnp.float32
  return lax.dot_general(
    a,
    b,
    dims,
    preferred_element_type=jnp.float32,
    precision=lax.Precision.HIGHEST if exact else None,
  )


def _columns(width, size):
  """(start, width) of the pieces that cut `width` columns."""
  return [(i, min(size, width - i)) for i in range(0, width, size)]


def _iota(shape, axis):
  return lax.broadcasted_iota(jnp.int32, shape, axis)


def _sum(arrays):
  return functools.reduce(jnp.add, arrays)


def _over_slots(x, combine):
  """Combines the CHUNK slots of [.., (r, t)] lanes; all slots get it."""
  for shift in (64, 32, 16):
    x = combine(x, pltpu.roll(x, shift, 1))
  return x


def _rows(refs, t, column, width):
  """[(r, t), width]: GROUP tokens of several arrays, one below the other."""
  return jnp.concatenate(
    [ref[pl.ds(t, GROUP), pl.ds(column, width)] for ref in refs], axis=0
  )


def _chunk_rows(refs, t, column, width):
  """`_rows`, filled up with zeros to CHUNK arrays."""
  rows = _rows(refs, t, column, width)
  missing = (CHUNK - len(refs)) * GROUP
  if missing:
    zeros = jnp.zeros((missing, width), rows.dtype)
    rows = jnp.concatenate([rows, zeros], axis=0)
  return rows


def _add_squares(squares, v):
  """Adds v^2 to {columns: [rows, columns]}, LANES columns at a time."""
  for column, size in _columns(v.shape[1], LANES):
    piece = v[:, column : column + size].astype(jnp.float32)
    piece = piece * piece
    squares[size] = squares[size] + piece if size in squares else piece


def forward(
  parts_ref,  # [P * Qp, D]: parts of the queries, Q padded to Qp
  *refs,  # R sources [tile, D]; then the outputs below
  num_sources,
  num_queries,
  eps,
  k_chunk,
  n_chunk,
  unroll,
  per_pass,
):
  """`per_pass` sources are mixed in one product of the matrix units.

  Outputs: Q of [tile, D]; max, sum [1, Q, tile]; with two refs more, what
  the derivative needs: inverse RMS of every source [1, groups * chunks, (r, t)]
  and logits [1, groups * chunks, Q, (r, t)]."""
  r, q = num_sources, num_queries
  sources, refs = refs[:r], refs[r:]
  outs, (max_ref, sum_ref, *saved_refs) = refs[:q], refs[q:]
  tile, width = sources[0].shape
  dtype = sources[0].dtype
  parts = num_parts(dtype)
  padded = parts_ref.shape[0] // parts
  chunks = [sources[i : i + CHUNK] for i in range(0, r, CHUNK)]
  lane = _iota((padded, LANES), 1)
  same_token = _iota((GROUP, LANES), 1) % GROUP == _iota((GROUP, LANES), 0)
  # Two bfloat16 parts of every weight, over half the tokens at a time, fill
  # as many lanes as one float32 weight over all of them.
  height = GROUP // 2 if dtype == jnp.bfloat16 else GROUP
  alone = r % per_pass == 1
  passes = [(i, min(per_pass, r - i)) for i in range(0, r - alone, per_pass)]

  def logits(chunk, t):
    """([Qp, (r, t)], [1, (r, t)]): logits and inverse RMS of a chunk."""
    # Both sums over the columns side by side: one keeps the matrix units
    # busy, the other the vector units.
    dots, squares = None, {}
    for column, size in _columns(width, k_chunk):
      v = _chunk_rows(chunk, t, column, size)
      piece = dot(parts_ref[:, pl.ds(column, size)], v, NT)
      dots = piece if dots is None else dots + piece
      if eps is not None:
        _add_squares(squares, v[: len(chunk) * GROUP])
    dots = _sum([dots[i * padded : (i + 1) * padded] for i in range(parts)])
    inverse = jnp.ones((1, LANES), jnp.float32)
    if eps is not None:
      total = jnp.zeros((1, LANES), jnp.float32)
      for square in squares.values():
        missing = LANES - square.shape[0]
        if missing:
          zeros = jnp.zeros((missing, square.shape[1]), jnp.float32)
          square = jnp.concatenate([square, zeros], axis=0)
        for part in split(square, dtype, 3):
          ones = jnp.ones((GROUP, part.shape[1]), part.dtype)
          total = total + dot(ones, part, NT)[:1]
      inverse = lax.rsqrt(total / width + eps)
    scaled = dots * inverse
    if len(chunk) < CHUNK:
      scaled = jnp.where(lane < len(chunk) * GROUP, scaled, MASKED)
    return scaled, inverse

  def left_factors(weights, start, members):
    """Of a pass over `members` sources from `start` on: [(q, t), (r, part, t)]
    for each run of `height` tokens, from the [Qp, (r, t)] weights of chunks."""
    factors = []
    for first in range(0, GROUP, height):
      same = same_token[first : first + height]
      tiles = []
      for c in range(start // CHUNK, -(-(start + members) // CHUNK)):
        rows = []
        for i in range(q):
          row = jnp.where(same, weights[c][i : i + 1], 0.0)
          if dtype == jnp.bfloat16:  # parts in the lanes of either token half
            high, low = (x.astype(jnp.float32) for x in split(row, dtype, 2))
            if first:
              high = pltpu.roll(high, LANES - height, 1)
            else:
              low = pltpu.roll(low, height, 1)
            row = high + low
          rows.append(row)
        tiles.append(jnp.concatenate(rows, axis=0).astype(dtype))
      factor = jnp.concatenate(tiles, axis=1)
      factors.append(factor[:, : members * GROUP])
    return factors

  def mixed(factors, start, members, t, column, size):
    """A pass's share of the outputs: per query runs of [height, size]."""
    shares = []
    for k, left in enumerate(factors):
      right = []
      for source in sources[start : start + members]:
        v = source[pl.ds(t + k * height, height), pl.ds(column, size)]
        right += [v] * (GROUP // height)
      product = dot(left, jnp.concatenate(right, axis=0))
      shares.append([product[i * height : (i + 1) * height] for i in range(q)])
    return [jnp.concatenate(x, axis=0) for x in zip(*shares, strict=True)]

  def normalise(scores):
    """Softmax over all chunks: (weights per chunk, max, sum)."""
    largest = _over_slots(functools.reduce(jnp.maximum, scores), jnp.maximum)
    exps = [jnp.exp(s - largest) for s in scores]
    total = _over_slots(_sum(exps), jnp.add)
    share = 1.0 / total
    return [e * share for e in exps], largest, total

  def mix(weights, t):
    factors = [left_factors(weights, *part) for part in passes]
    columns = []
    if alone:  # one source more than fills passes: for the vector units
      slot = weights[-1].T[:GROUP]
      columns = [slot[:, i : i + 1] for i in range(q)]
    for column, size in _columns(width, n_chunk):
      terms = [
        mixed(f, *part, t, column, size)
        for f, part in zip(factors, passes, strict=True)
      ]
      if alone:
        v = sources[-1][pl.ds(t, GROUP), pl.ds(column, size)]
        v = v.astype(jnp.float32)
        terms.append([x * v for x in columns])
      for out, values in zip(outs, zip(*terms, strict=True), strict=True):
        out[pl.ds(t, GROUP), pl.ds(column, size)] = _sum(values).astype(dtype)

  def groups(i, carry):
    numbers = [i * unroll + k for k in range(unroll)]
    starts = [pl.multiple_of(g * GROUP, GROUP) for g in numbers]
    # Stage by stage, so that one group's latencies hide behind another's work.
    scored = [[logits(c, t) for c in chunks] for t in starts]
    shares = [normalise([scores for scores, _ in x]) for x in scored]
    for g, t, x, (weights, largest, total) in zip(
      numbers, starts, scored, shares, strict=True
    ):
      mix(weights, t)
      if saved_refs:
        inverse_ref, score_ref = saved_refs
        for k, (scores, inverse) in enumerate(x):
          at = g * len(chunks) + k
          inverse_ref[0, pl.ds(at, 1), :] = inverse
          score_ref[0, at] = scores[:q]
      here = lane // GROUP == g
      carry = tuple(
        jnp.where(here, new, old)
        for new, old in zip((largest, total), carry, strict=True)
      )
    return carry

  zeros = jnp.zeros((padded, LANES), jnp.float32)
  trips = tile // GROUP // unroll
  largest, total = lax.fori_loop(0, trips, groups, (zeros, zeros))
  max_ref[0] = largest[:q, :tile]
  sum_ref[0] = total[:q, :tile]


def backward(
  pairs_ref,  # [C, D]: parts of the queries
  gather_ref,  # [(q, t), ..] 0/1: a query's lanes -> one lane for each part
  inverse_ref,  # [tile, R]: inverse RMS of the sources
  score_ref,  # [1, groups, R, (q, t)]: logits of the forward pass
  lse_ref,  # [1, groups, (q, t)]: max + log sum of the forward pass
  dlse_ref,  # [1, groups, (q, t)]: cotangent of the same
  *refs,  # R sources, Q cotangents [tile, D]; then the outputs below
  num_sources,
  num_queries,
  eps,
  k_chunk,
  n_chunk,
  unroll,
  block,
):
  """Outputs: R of [tile, D]; [1, C, D] float32, the derivative of `pairs`.

  With u = the derivative of the dots and p = the weights, per token

    d_source = sum_q p_q d_out_q + u_q query_q - (..) source
    d_query  = sum over sources and tokens of u source
  """
  r, q = num_sources, num_queries
  sources, d_outs, refs = refs[:r], refs[r : r + q], refs[r + q :]
  d_sources, d_pairs = refs[:r], refs[r]
  tile, width = sources[0].shape
  dtype = sources[0].dtype
  lanes, count = q * GROUP, pairs_ref.shape[0]
  first = lanes // LANES * LANES  # the tile of lanes where the parts begin
  blocks = [range(i, min(i + block, r)) for i in range(0, r, block)]
  same_token = _iota((GROUP, lanes), 1) % GROUP == _iota((GROUP, lanes), 0)

  @pl.when(pl.program_id(1) == 0)
  def _():
    d_pairs[...] = jnp.zeros_like(d_pairs)

  def diagonal(row):
    """[1, (q, t)] -> [t', (q, t)], zero unless t = t'."""
    return jnp.where(same_token, row, 0.0)

  def members_at(members, t, column, size):
    return _rows([sources[i] for i in members], t, column, size)

  def products(t):
    """Per block [(r, t'), (q, t)]: v . d_out of all pairs of tokens."""
    result = [None] * len(blocks)
    for column, size in _columns(width, k_chunk):
      rhs = _rows(d_outs, t, column, size)
      for b, members in enumerate(blocks):
        piece = dot(members_at(members, t, column, size), rhs, NT)
        result[b] = piece if result[b] is None else result[b] + piece
    return jnp.concatenate(result, axis=0)

  def derivative(g, t, product):
    """-> per block (left factor [(r, t), (q, t) + C], its last rows turned
    [C, (r, t)]), and per source the factor of v in its own derivative."""
    cuts = [slice(i * GROUP, (i + 1) * GROUP) for i in range(r)]
    d_weights = jnp.concatenate(
      [
        jnp.sum(jnp.where(same_token, product[c], 0.0), axis=0, keepdims=True)
        for c in cuts
      ],
      axis=0,
    )
    scores = score_ref[0, g]
    weights = jnp.exp(scores - lse_ref[0, pl.ds(g, 1), :])
    # Centred twice: what the sources share cancels exactly, and the second
    # mean takes out what rounding has left of it.
    for _ in range(2):
      mean = jnp.sum(weights * d_weights, axis=0, keepdims=True)
      d_weights = d_weights - mean
    d_scores = weights * (d_weights + dlse_ref[0, pl.ds(g, 1), :])
    norms = inverse_ref[pl.ds(t, GROUP), :]
    inverse = [norms[:, i : i + 1] for i in range(r)]
    left = [diagonal(weights[i : i + 1]) for i in range(r)]
    d_dots = [diagonal(d_scores[i : i + 1]) * inverse[i] for i in range(r)]
    radial = [None] * r
    if eps is not None:
      radial = [
        jnp.sum(d * scores[i : i + 1], axis=1, keepdims=True)
        * (inverse[i] * (-1.0 / width))
        for i, d in enumerate(d_dots)
      ]
    factors = []
    lane = _iota((1, lanes + count - first), 1) + first - lanes
    for members in blocks:
      height = len(members) * GROUP
      stacked = jnp.concatenate([d_dots[i] for i in members], axis=0)
      stacked = jnp.concatenate(split(stacked, dtype, 2), axis=0)
      gathered = dot(stacked, gather_ref[...])
      gathered = _sum(
        [gathered[i : i + height] for i in range(0, len(gathered), height)]
      )
      if dtype == jnp.bfloat16:  # (high, high, low) parts, as in `pairs`
        high, low = (x.astype(jnp.float32) for x in split(gathered, dtype, 2))
        gathered = jnp.where(lane < 2 * q, high, low)
      rows = jnp.concatenate([left[i] for i in members], axis=0)
      if lanes > first:
        last = jnp.pad(rows[:, first:], ((0, 0), (0, count)))
        gathered = gathered + last
      gathered = gathered.astype(dtype)
      turned = gathered.T[lanes - first : lanes - first + count]
      if first:
        gathered = jnp.concatenate(
          [rows[:, :first].astype(dtype), gathered], axis=1
        )
      factors.append((gathered, turned))
    return factors, radial

  def finish(t, factors, radial, column, size):
    """Writes the sources' derivatives; returns that of `pairs`."""
    rhs = jnp.concatenate(
      [_rows(d_outs, t, column, size), pairs_ref[:, pl.ds(column, size)]],
      axis=0,
    )
    d_queries = []
    for members, (left, turned) in zip(blocks, factors, strict=True):
      v = members_at(members, t, column, size)
      d_v = dot(left, rhs)
      for k, i in enumerate(members):
        cut = slice(k * GROUP, (k + 1) * GROUP)
        value = d_v[cut]
        if radial[i] is not None:
          value = value + radial[i] * v[cut].astype(jnp.float32)
        d_sources[i][pl.ds(t, GROUP), pl.ds(column, size)] = value.astype(dtype)
      d_queries.append(dot(turned, v))
    return _sum(d_queries)

  def groups(i, carry):
    numbers = [i * unroll + k for k in range(unroll)]
    starts = [pl.multiple_of(g * GROUP, GROUP) for g in numbers]
    multiplied = [products(t) for t in starts]
    stages = [
      derivative(g, t, x)
      for g, t, x in zip(numbers, starts, multiplied, strict=True)
    ]
    for column, size in _columns(width, n_chunk):
      d_pairs[0, :, pl.ds(column, size)] += _sum(
        [
          finish(t, *stage, column, size)
          for t, stage in zip(starts, stages, strict=True)
        ]
      )
    return carry

  lax.fori_loop(0, tile // GROUP // unroll, groups, 0)
