"""The interface of depth mixing, and the loop that drives it.

A residual mechanism answers two questions for every sublayer: what does it
read, and where does its output go? `DepthMixer` is these two answers; `run` is
the only place that asks them. To add a mechanism, subclass `DepthMixer` in a
file of its own and name it in registry.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from attnres_jax.errors import UserError

State = Any  # a pytree of arrays; shards, remats and donates like any other
Slice = Any  # what `open` prepares for one sublayer: its parameters and results
Norm = Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]
Sublayer = Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]

# What the backward pass recomputes: nothing, every sublayer with its read and
# write, or every block of `DepthMixer.blocks` with its `open` and `close`.
REMAT = ("none", "sublayer", "block")


class FusableNorm:
  """An RMSNorm over the width that a mixer may compute itself.

  `read` is handed a norm and may apply it to its result like any function. If
  it is one of these, it may instead compute scale * h / sqrt(mean(h^2) + eps)
  in the pass that makes h, in float32, and return it in the sources' dtype.

  Attributes:
    scale: [D] float32, an array or a parameter; None: ones.
    eps: added to the mean square.
  """

  scale: Float[Array, "D"] | None
  eps: float


class DepthParam(nnx.Param):
  """A parameter of a mixer. Roles go by type: the optimizer gives this one no
  weight decay and no orthogonalised update, whatever its rank is."""


class DepthMixer(nnx.Module):
  """Base of every residual mechanism. All methods are pure.

  Attributes:
    num_sublayers: L, sublayers of the model.
    width: D, channels.
  """

  def __init__(self, num_sublayers: int, width: int):
    self.num_sublayers = num_sublayers
    self.width = width

  @property
  def blocks(self) -> tuple[range, ...]:
    """Consecutive runs of sublayers that `open` and `close` surround."""
    return tuple(range(i, i + 1) for i in range(self.num_sublayers))

  def sources(self, sublayer: int) -> tuple[tuple[int, ...], ...]:
    """What a sublayer reads, as plain numbers.

    Args:
      sublayer: 0-based index; L stands for `finish`.

    Returns:
      One tuple per source, in the order of `weights`: the numbers of the
      outputs that the source carries (0: the embedding, i: what sublayer i - 1
      returned).
    """
    raise NotImplementedError

  def start(self, embedding: Float[Array, "B T D"]) -> State:
    """The state before the first sublayer. The embedding is output 0."""
    raise NotImplementedError

  def open(self, state: State, block: range) -> tuple[State, list[Slice]]:
    """Prepares a block: its state, and one slice per sublayer."""
    del block
    return state, [None]

  def read(
    self, state: State, x: Slice, norm: Norm
  ) -> tuple[Float[Array, "B T D"], State]:
    """The input of a sublayer, through its PreNorm, and the state after it.

    `norm` is any function, or a `FusableNorm`.
    """
    raise NotImplementedError

  def write(
    self, state: State, x: Slice, output: Float[Array, "B T D"]
  ) -> State:
    """Takes in what the sublayer returned. May leave work to the next read."""
    raise NotImplementedError

  def close(self, state: State, block: range) -> State:
    """Ends a block."""
    del block
    return state

  def last(self) -> Slice:
    """The slice that `finish` reads with."""
    return None

  def finish(self, state: State) -> Float[Array, "B T D"]:
    """What the final norm and the head see."""
    raise NotImplementedError

  def weights(self, state: State, x: Slice) -> Float[Array, "R B T H"]:
    """The weight of every source of `sources`, float32, H: depth heads (1).

    Args:
      state: the state before the sublayer's `read`.
      x: the sublayer's slice; `last()` for what `finish` reads.
    """
    raise NotImplementedError

  def describe(self) -> str:
    """One line for people: boundaries and how many sources are read."""
    counts = [len(self.sources(l)) for l in range(self.num_sublayers + 1)]
    return (
      f"{type(self).__name__}: {self.num_sublayers} sublayers; sources read"
      f" per sublayer {_runs(counts[:-1])}; {counts[-1]} at the output"
    )


def run(
  mixer: DepthMixer,
  embedding: Float[Array, "B T D"],
  sublayers: Sequence[tuple[Norm, Sublayer]],
  *,
  remat: str = "none",
  observe: Callable[[int, Float[Array, "R B T H"]], None] | None = None,
) -> Float[Array, "B T D"]:
  """Runs a stack of sublayers whose residual connections are the mixer.

  Args:
    mixer: the mechanism.
    embedding: output 0.
    sublayers: L pairs (PreNorm, function), in order.
    remat: one of REMAT.
    observe: called with (l, weights) before sublayer l reads, and with
      (L, weights) before the output aggregation. Leaks tracers under remat.

  Returns:
    What the final norm and the head see.
  """
  if len(sublayers) != mixer.num_sublayers:
    raise ValueError(
      f"got {len(sublayers)} sublayers, expected the mixer's"
      f" {mixer.num_sublayers}: build both from the same depth."
    )

  def step(state, x, l):
    norm, sublayer = sublayers[l]
    h_BTD, state = mixer.read(state, x, norm)
    return mixer.write(state, x, sublayer(h_BTD))

  if remat == "sublayer":
    step = jax.checkpoint(step, static_argnums=2)

  def run_block(state, block):
    state, slices = mixer.open(state, block)
    for l, x in zip(block, slices, strict=True):
      if observe is not None:
        observe(l, mixer.weights(state, x))
      state = step(state, x, l)
    return mixer.close(state, block)

  if remat == "block":
    run_block = jax.checkpoint(run_block, static_argnums=1)

  state = mixer.start(embedding)
  for block in mixer.blocks:
    state = run_block(state, block)
  if observe is not None:
    observe(mixer.num_sublayers, mixer.weights(state, mixer.last()))
  return mixer.finish(state)


def check_positive(option: str, value: int) -> None:
  """Raises a UserError unless an option of a mixer is at least 1."""
  if value < 1:
    raise UserError(
      f"got {option} {value}: expected an integer >= 1. Set it with"
      f" --config.mixer.{option}."
    )


def _runs(counts: list[int]) -> str:
  """[1, 2, 2, 2] -> "1, 2 (x3)"."""
  parts, i = [], 0
  while i < len(counts):
    j = i
    while j < len(counts) and counts[j] == counts[i]:
      j += 1
    parts.append(f"{counts[i]}" + (f" (x{j - i})" if j - i > 1 else ""))
    i = j
  return ", ".join(parts)
