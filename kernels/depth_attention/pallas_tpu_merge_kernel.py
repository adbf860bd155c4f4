"""Kernel bodies of phase 2; pallas_tpu_merge.py calls them.

A body sees one tile of tokens, all of D. It walks over groups of `rows`
tokens, and in a group over vectors of 128 lanes of D, so that what belongs to
a vector stays in registers. A pass over D inside VMEM is cheap; HBM is read
and written once.

With sources v_i (the recent ones, then attended.out o) and weights a_i:
  h = sum_i a_i v_i      r = 1 / RMS(h)      normed = h r g
  g' = d_normed g      q = r^3 (g' . h) / D      dh = r g' - q h + d_merged
  e_i = a_i (dh . v_i - dh . h)                  gradient of logit i
  d_v_k = a_k dh + e_k n_k (c - s_k n_k v_k / D)      d_o = a_o dh
  d_sum = e_o / sum      d_c = sum over tokens and k of e_k n_k v_k
where c is the query, n_k = 1 / RMS(v_k) and s_k = (c . v_k) n_k the logit. As
dh . v_i = r (g' . v_i) - q (h . v_i) + d_merged . v_i, the sums over D that the
backward needs do not wait for one another; h . v_i comes from the forward.

Numbers per token lie along lanes in HBM (4 bytes each, where a column would
take 512) and are turned to columns and back with a mask and a sum, which is
exact. Rows past the last token and lanes past D hold anything, NaN too: a
`where` keeps them out of every sum.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LANES = 128
SUBLANES = 8
F32 = jnp.float32


class Spec(NamedTuple):
  """What the bodies know when they are traced.

  Attributes:
    width: D, the divisor of means; blocks are padded to whole vectors.
    tokens: of all tiles; the last tile may have fewer than `tile`.
    tile: tokens of a grid step.
    rows: tokens of a group; a divisor of `tile`.
    weighted: whether there is more than one source; the weight of a single
      one is 1, whatever the query.
    saved: names of the rows of the numbers per token that are saved.
    key_eps, norm_eps: as in MergeOptions.
  """

  width: int
  tokens: int
  tile: int
  rows: int
  weighted: bool
  saved: tuple[str, ...]
  key_eps: float | None
  norm_eps: float | None


def forward(spec: Spec, ins, outs, mixture=None):
  """One tile of `merge`.

  Args:
    spec: static facts.
    ins: refs: query [1, D]; optional norm_scale [1, D], out [tile, D],
      max, sum [1, tile], update [tile, D]; recent: tuple of [tile, D].
    outs: refs: normed; optional total, merged [tile, D], saved [n, tile].
    mixture: float32 scratch [rows, D], where there is a norm.
  """

  def group(i, _):
    _forward_group(spec, ins, outs, mixture, _place(spec, i))

  jax.lax.fori_loop(0, spec.tile // spec.rows, group, None)


def _forward_group(spec, ins, outs, mixture, place):
  rows, lanes, offset = place
  recent, attended = ins["recent"], "out" in ins
  columns = _columns(ins["query"])

  # The total, and the sums of the logits.
  dots, squares = _zeros(spec, len(recent)), _zeros(spec, len(recent))
  for cols in columns if spec.weighted or "update" in ins else ():
    vs = [_load(ref, rows, cols) for ref in recent]
    if "update" in ins:
      vs[-1] += _load(ins["update"], rows, cols)
      _store(outs["total"], rows, cols, vs[-1])
    for k, v in enumerate(vs if spec.weighted else ()):
      dots[k] += _inside(spec, cols, ins["query"][:, cols] * v)
      if spec.key_eps is not None:
        squares[k] += _inside(spec, cols, v * v)

  found, weights = {}, None
  if spec.weighted:
    logits = [_row_sum(x) for x in dots]
    if spec.key_eps is not None:
      inverses = [_rms_inverse(spec, x, spec.key_eps) for x in squares]
      logits = [x * n for x, n in zip(logits, inverses, strict=True)]
      found |= {f"inverse{k}": n for k, n in enumerate(inverses)}
    found |= {f"logit{k}": s for k, s in enumerate(logits)}
    part = [ins[x][:, lanes] for x in ("max", "sum")] if attended else ()
    weights = _weights(logits, *(_to_column(spec, x, offset) for x in part))

  # The mixture and its sums.
  square = _zeros(spec, 1)[0]
  dots = _zeros(spec, len(recent) + attended)
  for cols in columns:
    vs = _sources(ins, outs, rows, cols)
    h = _mix(weights, vs)
    if "merged" in outs:
      _store(outs["merged"], rows, cols, h)
    if spec.norm_eps is None:
      _store(outs["normed"], rows, cols, h)
      continue
    mixture[:, cols] = h
    square += _inside(spec, cols, h * h)
    if spec.weighted and "saved" in outs:
      for j, v in enumerate(vs):
        dots[j] += _inside(spec, cols, h * v)

  if spec.norm_eps is not None:
    scale = found["scale"] = _rms_inverse(spec, square, spec.norm_eps)
    for cols in columns:
      y = mixture[:, cols] * scale
      if "norm_scale" in ins:
        y *= ins["norm_scale"][:, cols]
      _store(outs["normed"], rows, cols, y)

  if "saved" in outs:
    found |= {f"dot{j}": _row_sum(x) for j, x in enumerate(dots)}
    for row, name in enumerate(spec.saved):
      x = _to_lanes(spec, found[name], offset)
      _store_lanes(spec, outs["saved"], row, lanes, offset, x)


def backward(spec: Spec, ins, outs):
  """One tile of the gradient of `merge`, as a step of a grid (parts, steps).

  Args:
    spec: static facts.
    ins: refs as in `forward`, with the total in recent[-1] and no update;
      also d_normed, optional d_total, d_merged [tile, D], saved [n, tile].
    outs: refs: optional d_out, d_update [tile, D], d_sum [1, tile];
      d_recent: tuple of [tile, D]; optional d_query, d_norm_scale [8, D]
      float32, whose rows add up to the sum over the part's tokens.
  """
  tile = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

  @pl.when(pl.program_id(1) == 0)
  def _():
    for name in ("d_query", "d_norm_scale"):
      if name in outs:
        outs[name][...] = jnp.zeros_like(outs[name])

  def group(i, _):
    place = _place(spec, i)
    left = spec.tokens - tile * spec.tile - i * spec.rows
    terms = _gradient_terms(spec, ins, outs, place)
    _write_gradients(spec, ins, outs, place[0], left, terms)

  # All parts take the same number of steps: the last one may end with steps
  # that have no tile of their own and see the blocks of the step before.
  @pl.when(tile * spec.tile < spec.tokens)
  def _():
    jax.lax.fori_loop(0, spec.tile // spec.rows, group, None)


class _Terms(NamedTuple):
  """Columns [rows, 1] of the formulas above; lists over sources; or None.

  weights: a_i. scale: r. back: q / r. pulls: e_k n_k. shrinks: e_k n_k^2 s_k/D.
  """

  weights: list | None
  scale: jax.Array | None
  back: jax.Array | None
  pulls: list
  shrinks: list


def _gradient_terms(spec, ins, outs, place):
  """The sums over D of a group, and what follows from them; writes d_sum."""
  rows, lanes, offset = place
  recent, attended = len(ins["recent"]), "out" in ins
  normed = spec.norm_eps is not None
  saved = {
    name: ins["saved"][row : row + 1, lanes]
    for row, name in enumerate(spec.saved)
  }
  column = functools.partial(_to_column, spec, offset=offset)

  by_normed, by_merged = (_zeros(spec, recent + attended) for _ in range(2))
  for cols in _columns(ins["query"]) if spec.weighted or normed else ():
    g = _upstream(ins, rows, cols)
    for j, v in enumerate(_sources(ins, outs, rows, cols)):
      by_normed[j] += _inside(spec, cols, g * v)
      if spec.weighted and "d_merged" in ins:
        d = _load(ins["d_merged"], rows, cols)
        by_merged[j] += _inside(spec, cols, d * v)

  weights = scale = back = None
  # dh . v_i
  along = by_normed = [_row_sum(x) for x in by_normed]
  if spec.weighted:
    logits = [saved[f"logit{k}"] for k in range(recent)]
    part = [ins[x][:, lanes] for x in ("max", "sum")] if attended else ()
    weights = [column(x) for x in _weights(logits, *part)]
  if normed:
    scale = column(saved["scale"])
    back = scale * scale * (1 / spec.width) * _mix(weights, by_normed)
  if not spec.weighted:
    return _Terms(weights, scale, back, [], [])
  if normed:
    along = [
      scale * (x - back * column(saved[f"dot{j}"]))
      for j, x in enumerate(by_normed)
    ]
  if "d_merged" in ins:
    along = [x + _row_sum(y) for x, y in zip(along, by_merged, strict=True)]
  mean = _mix(weights, along)
  d_logits = [w * (x - mean) for w, x in zip(weights, along, strict=True)]
  if attended:
    x = _to_lanes(spec, d_logits[-1], offset) / ins["sum"][:, lanes]
    _store_lanes(spec, outs["d_sum"], 0, lanes, offset, x)
  pulls, shrinks = d_logits[:recent], []
  if spec.key_eps is not None:
    inverses = [saved[f"inverse{k}"] for k in range(recent)]
    pulls = [e * column(n) for e, n in zip(pulls, inverses, strict=True)]
    shrinks = [
      u * column(n * s * (1 / spec.width))
      for u, n, s in zip(pulls, inverses, logits, strict=True)
    ]
  return _Terms(weights, scale, back, pulls, shrinks)


def _write_gradients(spec, ins, outs, rows, left, terms):
  """The pass over D that writes; only the first `left` rows are tokens."""
  weights, scale, back, pulls, shrinks = terms
  last = len(ins["recent"]) - 1
  if weights is not None and scale is not None:
    scaled_weights = [w * scale for w in weights]
  for cols in _columns(ins["query"]):
    vs = _sources(ins, outs, rows, cols)
    d = _upstream(ins, rows, cols)
    if scale is not None:
      # h r: the norm of the mixture, before norm_scale.
      y = vs[0] * scale if weights is None else _mix(scaled_weights, vs)
      if "d_norm_scale" in outs:
        x = y * _load(ins["d_normed"], rows, cols)
        _accumulate(spec, outs["d_norm_scale"], cols, x, left)
      d = scale * d - back * y
    if "d_merged" in ins:
      d += _load(ins["d_merged"], rows, cols)
    if "d_out" in outs:
      x = d if weights is None else weights[-1] * d
      _store(outs["d_out"], rows, cols, x)
    for k in range(last + 1):
      x = d
      if weights is not None:
        x = weights[k] * d + pulls[k] * ins["query"][:, cols]
      if shrinks:
        x -= shrinks[k] * vs[k]
      if k == last and "d_total" in ins:
        x += _load(ins["d_total"], rows, cols)
      _store(outs["d_recent"][k], rows, cols, x)
      if k == last and "d_update" in outs:
        _store(outs["d_update"], rows, cols, x)
    if pulls:
      _accumulate(
        spec, outs["d_query"], cols, _mix(pulls, vs[: last + 1]), left
      )


def _columns(vector):
  """The vectors of 128 lanes of a [1, D] ref, as static slices."""
  return [pl.ds(c, LANES) for c in range(0, vector.shape[1], LANES)]


def _place(spec, i):
  """Group i: its rows; its vector of lanes and where in it it begins."""
  start = i * spec.rows
  rows = pl.ds(pl.multiple_of(start, spec.rows), spec.rows)
  if spec.tile <= LANES:
    return rows, pl.ds(0, spec.tile), start
  # Not `//`: its lowering asks for facts of the chip, and there may be none.
  first = jax.lax.div(start, start.dtype.type(LANES)) * LANES
  return rows, pl.ds(pl.multiple_of(first, LANES), LANES), start - first


def _load(ref, rows, cols):
  return ref[rows, cols].astype(F32)


def _store(ref, rows, cols, x):
  ref[rows, cols] = x.astype(ref.dtype)


def _sources(ins, outs, rows, cols):
  """The recent sources, then attended.out, in float32."""
  refs = [*ins["recent"], *([ins["out"]] if "out" in ins else [])]
  last = len(ins["recent"]) - 1
  again = "update" in ins and outs["total"].dtype != F32
  if "update" in ins and not again:
    refs[last] = outs["total"]
  vs = [_load(ref, rows, cols) for ref in refs]
  if again:
    # The rounded total is for others; the mixture is made of the exact one.
    vs[last] += _load(ins["update"], rows, cols)
  return vs


def _upstream(ins, rows, cols):
  """d_normed with the norm's scale, in float32."""
  g = _load(ins["d_normed"], rows, cols)
  return g * ins["norm_scale"][:, cols] if "norm_scale" in ins else g


def _weights(logits, top=None, total=None):
  """Softmax weights of the recent sources, then of the attended part."""
  highest = functools.reduce(
    jnp.maximum, logits if top is None else [*logits, top]
  )
  weights = [jnp.exp(x - highest) for x in logits]
  if top is not None:
    weights.append(total * jnp.exp(top - highest))
  scale = 1 / functools.reduce(operator.add, weights)
  return [w * scale for w in weights]


def _mix(weights, vs):
  """sum_i weights_i v_i; weights None: there is one v, of weight 1."""
  if weights is None:
    return vs[0]
  terms = [w * v for w, v in zip(weights, vs, strict=True)]
  # Not sum(): its 0 is one more addition.
  return functools.reduce(operator.add, terms)


def _zeros(spec, count):
  return [jnp.zeros((spec.rows, LANES), F32) for _ in range(count)]


def _iota(spec, width, axis):
  return jax.lax.broadcasted_iota(jnp.int32, (spec.rows, width), axis)


def _inside(spec, cols, x):
  """x [rows, 128] with zeros for the lanes past D."""
  if cols.start + LANES <= spec.width:
    return x
  return jnp.where(_iota(spec, LANES, 1) < spec.width - cols.start, x, 0.0)


def _row_sum(x):
  return jnp.sum(x, axis=1, keepdims=True)


def _rms_inverse(spec, squares, eps):
  return jax.lax.rsqrt(_row_sum(squares) * (1 / spec.width) + eps)


def _own_lane(spec, width, offset):
  return _iota(spec, width, 1) == _iota(spec, width, 0) + offset


def _to_column(spec, row, offset):
  """[1, lanes], a number per token -> [rows, 1] of the group."""
  own = _own_lane(spec, row.shape[1], offset)
  return _row_sum(jnp.where(own, row, 0.0))


def _to_lanes(spec, column, offset):
  """[rows, 1] -> [1, lanes], zero outside the group's lanes."""
  own = _own_lane(spec, min(LANES, spec.tile), offset)
  return jnp.sum(jnp.where(own, column, 0.0), axis=0, keepdims=True)


def _store_lanes(spec, ref, row, lanes, offset, x):
  """Writes the group's lanes of a [n, tile] ref."""
  lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) - offset
  own = (lane >= 0) & (lane < spec.rows)
  ref[row : row + 1, lanes] = jnp.where(own, x, ref[row : row + 1, lanes])


def _accumulate(spec, ref, cols, x, left):
  """Adds x [rows, 128], summed down to 8 rows, to ref[:, cols]."""
  if spec.tokens % spec.tile:
    x = jnp.where(_iota(spec, LANES, 0) < left, x, 0.0)
  slabs = [x[j : j + SUBLANES] for j in range(0, spec.rows, SUBLANES)]
  ref[:, cols] += functools.reduce(operator.add, slabs)
