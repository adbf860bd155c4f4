"""Attention Residuals: Full, Block, and their sliding window.

All three are one schedule. The state holds finished sources and the recent
ones of the block that is running. `open` attends over the finished sources for
every query of the block at once (phase 1); `read` merges in the recent ones
(phase 2). They differ in what `write` does with an output and in which sources
`close` keeps:

  Full     write: one more recent source         close: all stay
  Block    write: added to the running sum b_n   close: the sum is a source
  window   write: one more recent source         close: embedding + W newest
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from attnres_jax.depth_mixing import attention, queries
from attnres_jax.depth_mixing.attention import Partial
from attnres_jax.depth_mixing.base import DepthMixer, check_positive
from attnres_jax.errors import UserError, unknown_name

QUERIES = ("static", "input", "none")
QUERY_INPUTS = ("latest", "previous")
SCHEDULES = ("two_phase", "single_phase")


class DepthState(NamedTuple):
  """Attributes:
  finished: sources that no later sublayer changes; the embedding is first.
  recent: sources of the running block, in order; empty at its start.
  previous: the last mixture that was read (only with query_input="previous").
  """

  finished: tuple[Float[Array, "B T D"], ...]
  recent: tuple[Float[Array, "B T D"], ...] = ()
  previous: Float[Array, "B T D"] | None = None


class DepthSlice(NamedTuple):
  """One sublayer's query, and its phase-1 result (None: single phase)."""

  query: Array
  partial: Partial | None


class AttnRes(DepthMixer):
  """Eqs. 2-4: h_l = sum_i a_{l,i} v_i, a proportional to phi(w_l, k_i).

  The final aggregation has a query and a key norm of its own. The first
  sublayer has a single source, so its query never gets a gradient; it stays,
  so that every sublayer looks the same.
  """

  def __init__(
    self,
    num_sublayers: int,
    width: int,
    *,
    norm_eps: float,
    query: str = "static",
    query_input: str = "latest",
    activation: str = "softmax",
    key_norm: bool = True,
    heads: int = 1,
    schedule: str = "two_phase",
  ):
    """Args:
      num_sublayers: L.
      width: D.
      norm_eps: added to the mean square in the key norm.
      query: static (the paper's pseudo-query) | input (projected from the
        current hidden state) | none (learned scalars).
      query_input: what feeds query=input: latest (the newest source, as it is
        before the sublayer) | previous (what the sublayer before it read).
      activation: softmax | sigmoid | normalised_sigmoid.
      key_norm: RMSNorm on the keys, with a learned scale.
      heads: channel groups with weights of their own; divides the width.
      schedule: two_phase | single_phase (the oracle; query=input needs it and
        takes it by itself).

    Raises:
      UserError: an unknown name, or heads that do not divide the width.
    """
    super().__init__(num_sublayers, width)
    _check_name("query", query, QUERIES)
    _check_name("query_input", query_input, QUERY_INPUTS)
    _check_name("activation", activation, attention.ACTIVATIONS)
    _check_name("schedule", schedule, SCHEDULES)
    if heads < 1 or width % heads:
      raise UserError(
        f"got {heads} depth heads for width {width}: expected a positive"
        " divisor of the width. Set it with --config.mixer.heads."
      )
    self.activation = activation
    self.keep_previous = query == "input" and query_input == "previous"
    n = num_sublayers + 1
    if query == "none":
      counts = [len(self.sources(l)) for l in range(n)]
      self.query = queries.NoQuery(counts, heads)
    else:
      keys = (
        queries.KeyNorm(n, width, norm_eps) if key_norm else queries.RawKeys()
      )
      self.query = (
        queries.StaticQuery(n, width, heads, keys)
        if query == "static"
        else queries.InputQuery(n, width, heads, keys, norm_eps)
      )
    self.two_phase = schedule == "two_phase" and self.query.two_phase

  def start(self, embedding):
    return DepthState((embedding,), (), self._previous(embedding))

  def open(self, state, block):
    rows = [self.query.at(l) for l in block]
    if not self.two_phase:
      return state, [DepthSlice(q, None) for q in rows]
    partials = self._attend(rows, state, state.finished, first=0)
    return state, [
      DepthSlice(q, p) for q, p in zip(rows, partials, strict=True)
    ]

  def read(self, state, x, norm):
    if x.partial is None:
      sources = state.finished + state.recent
      (partial,) = self._attend([x.query], state, sources, first=0)
    else:
      partial = x.partial
      if state.recent:
        (recent,) = self._attend(
          [x.query], state, state.recent, first=len(state.finished)
        )
        partial = attention.merge(partial, recent)
    h_BTD = attention.normalise(partial, self._phi)
    h_BTD = h_BTD.astype(state.finished[0].dtype)
    return norm(h_BTD), state._replace(previous=self._previous(h_BTD))

  def write(self, state, x, output):
    return state._replace(recent=(*state.recent, output))

  def close(self, state, block):
    dtype = state.finished[0].dtype
    recent = tuple(v.astype(dtype) for v in state.recent)
    return state._replace(finished=state.finished + recent, recent=())

  def last(self):
    return DepthSlice(self.query.at(self.num_sublayers), None)

  def finish(self, state):
    return self.read(state, self.last(), lambda h_BTD: h_BTD)[0]

  def weights(self, state, x):
    sources = state.finished + state.recent
    current = self._current(state)
    logits_QRBTH = self.query.logits([x.query], sources, 0, current)
    weights_RBTH = self._phi.weigh(logits_QRBTH)[0][0]
    if self._phi.normalised:
      weights_RBTH /= weights_RBTH.sum(0)
    return weights_RBTH

  @property
  def _phi(self) -> attention.Activation:
    return attention.ACTIVATIONS[self.activation]

  def _current(self, state: DepthState) -> Float[Array, "B T D"]:
    if state.previous is not None:
      return state.previous
    return (state.finished + state.recent)[-1]

  def _previous(self, h_BTD):
    return h_BTD if self.keep_previous else None

  def _attend(self, rows, state, sources, first) -> list[Partial]:
    current = self._current(state)
    logits_QRBTH = self.query.logits(rows, sources, first, current)
    return attention.attend(logits_QRBTH, sources, self._phi)


class FullAttnRes(AttnRes):
  """Every sublayer attends over the embedding and every earlier output.

  The L queries are cut into groups of `group_size` sublayers for the two-phase
  schedule; the values do not depend on it.
  """

  def __init__(self, num_sublayers, width, *, group_size: int = 4, **options):
    check_positive("group_size", group_size)
    self.group_size = group_size
    super().__init__(num_sublayers, width, **options)

  @property
  def blocks(self):
    return _cut(self.num_sublayers, self.group_size)

  def sources(self, sublayer):
    return tuple((i,) for i in range(sublayer + 1))


class BlockAttnRes(AttnRes):
  """Eqs. 5-6: sources are the embedding, finished block sums, the running sum.

  The first sublayer of a block sees [b_0 .. b_{n-1}], the others also the
  running sum. A last block that the depth cuts short is a block like the
  others. The running sum is float32; a finished one has the sources' dtype.
  """

  def __init__(
    self,
    num_sublayers,
    width,
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    **options,
  ):
    """Args:
    block_size: S >= 1, sublayers per block; need not divide L, may exceed it.
    num_blocks: instead of block_size: 1 <= N <= L; then S = ceil(L / N), so
      that N that does not divide L may give fewer blocks (describe() says).
      With neither, N = min(8, L), the paper's choice.
    """
    if block_size is not None and num_blocks is not None:
      raise UserError(
        f"got both block_size {block_size} and num_blocks {num_blocks}:"
        " expected one. Set --config.mixer.block_size or"
        " --config.mixer.num_blocks."
      )
    if block_size is None:
      n = min(8, num_sublayers) if num_blocks is None else num_blocks
      if not 1 <= n <= num_sublayers:
        raise UserError(
          f"got num_blocks {n}: expected 1 to {num_sublayers}, the number of"
          " sublayers. Set it with --config.mixer.num_blocks."
        )
      block_size = -(-num_sublayers // n)
    check_positive("block_size", block_size)
    self.block_size = block_size
    super().__init__(num_sublayers, width, **options)

  @property
  def blocks(self):
    return _cut(self.num_sublayers, self.block_size)

  def sources(self, sublayer):
    ends = range(self.block_size, sublayer + self.block_size, self.block_size)
    sums = [
      tuple(range(end - self.block_size + 1, min(end, sublayer) + 1))
      for end in ends
    ]
    return ((0,), *sums)

  def write(self, state, x, output):
    output = output.astype(jnp.float32)
    if state.recent:
      output = state.recent[0] + output
    return state._replace(recent=(output,))

  def describe(self):
    bounds = ", ".join(f"{b.start}-{b.stop - 1}" for b in self.blocks)
    return f"{super().describe()}; blocks of sublayers {bounds}"


class SlidingWindowAttnRes(AttnRes):
  """Table 4's SWA: the embedding and the W newest outputs (W = 1 + 8 there).

  The aggregation at the output reads the same window.
  """

  def __init__(self, num_sublayers, width, *, window: int = 8, **options):
    check_positive("window", window)
    self.window = window
    super().__init__(num_sublayers, width, **options)

  def sources(self, sublayer):
    first = max(1, sublayer + 1 - self.window)
    return ((0,), *((i,) for i in range(first, sublayer + 1)))

  def close(self, state, block):
    state = super().close(state, block)
    embedding, *outputs = state.finished
    return state._replace(finished=(embedding, *outputs[-self.window :]))


def _cut(length: int, size: int) -> tuple[range, ...]:
  return tuple(range(i, min(i + size, length)) for i in range(0, length, size))


def _check_name(option: str, value: str, known) -> None:
  if value not in known:
    raise unknown_name(option, value, known, f"--config.mixer.{option}")
