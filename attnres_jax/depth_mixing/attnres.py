"""Attention Residuals: Full, Block, and their sliding window.

All three are one schedule. The state holds finished sources and the recent
ones of the block that is running. `open` attends over the finished sources for
every query of the block at once (phase 1); `read` merges in the recent ones
(phase 2). They differ in what `write` does with an output and in which sources
`close` keeps:

  Full     write: one more recent source         close: all stay
  Block    write: to be added to the sum b_n     close: the sum is a source
  window   write: one more recent source         close: embedding + W newest

Both phases are computed by the kernel package, or by plain JAX where it lacks
an option; paths.py has the two.
"""

from typing import NamedTuple

from jaxtyping import Array

from attnres_jax.depth_mixing import attention, paths, queries
from attnres_jax.depth_mixing.base import DepthMixer, check_positive
from attnres_jax.depth_mixing.paths import DepthState
from attnres_jax.errors import UserError, unknown_name

QUERIES = ("static", "input", "none")
QUERY_INPUTS = ("latest", "previous")
SCHEDULES = ("two_phase", "single_phase")


class DepthSlice(NamedTuple):
  """One sublayer's query, and its phase-1 result (None: single phase)."""

  query: Array
  attended: paths.Attended | paths.Partial | None


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
    implementation: str | None = None,
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
      implementation: xla | pallas_tpu | reference, of the kernel package; None
        leaves it the choice. Only for query=static, activation=softmax and
        heads=1: anything else runs in plain JAX (see describe()).

    Raises:
      UserError: an unknown name, heads that do not divide the width, or an
        implementation for options that it does not have.
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
    self.path = paths.choose(query, activation, heads, implementation)
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
    previous = embedding if self.keep_previous else None
    return DepthState((embedding,), previous=previous)

  def open(self, state, block):
    rows = [self.query.at(l) for l in block]
    attended = [None] * len(rows)
    if self.two_phase:
      attended = self.path.attend(self.query, rows, state)
    return state, [
      DepthSlice(*parts) for parts in zip(rows, attended, strict=True)
    ]

  def read(self, state, x, norm):
    seen, attended = state, x.attended
    if attended is None:  # single phase: as if every source had finished
      state = state.added()
      seen = state.closed()
      (attended,) = self.path.attend(self.query, [x.query], seen)
    merged = self.path.merge(self.query, x.query, attended, seen, norm)
    if merged.total is not None:
      recent = (*state.recent[:-1], merged.total)
      state = state._replace(recent=recent, pending=None)
    if self.keep_previous:
      state = state._replace(previous=merged.merged)
    return merged.normed, state

  def write(self, state, x, output):
    return state._replace(recent=(*state.recent, output))

  def close(self, state, block):
    return state.closed()

  def last(self):
    return DepthSlice(self.query.at(self.num_sublayers), None)

  def finish(self, state):
    return self.read(state, self.last(), lambda h_BTD: h_BTD)[0]

  def weights(self, state, x):
    state = state.added()
    sources = state.finished + state.recent
    phi = attention.ACTIVATIONS[self.activation]
    logits_QRBTH = self.query.logits([x.query], sources, 0, state.current())
    weights_RBTH = phi.weigh(logits_QRBTH)[0][0]
    if phi.normalised:
      weights_RBTH /= weights_RBTH.sum(0)
    return weights_RBTH

  def describe(self):
    return f"{super().describe()}; depth attention: {self.path.describe()}"


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
    if not state.recent:
      return state._replace(recent=(output,))
    return state._replace(pending=output)

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
