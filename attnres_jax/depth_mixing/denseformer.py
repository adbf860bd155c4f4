"""DenseFormer (arXiv:2402.02622): a static mix of all earlier states."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from attnres_jax.depth_mixing import attention
from attnres_jax.depth_mixing.base import (
  DepthMixer,
  DepthParam,
  check_positive,
)


class DenseState(NamedTuple):
  """Attributes:
  states: X_0 .. X_i, the embedding and the stream after every sublayer.
  current: Y_i, what the next sublayer adds to; None before it is mixed.
  """

  states: tuple[Float[Array, "B T D"], ...]
  current: Float[Array, "B T D"] | None


class DenseFormer(DepthMixer):
  """Y_i = sum_j a_ij X_j,  X_{i+1} = Y_i + f(norm(Y_i)),  X_0 = embedding.

  The mix runs after every `period`-th sublayer and over every `dilation`-th
  state, counted back from the newest (j = i mod dilation). Both are in
  sublayers, the unit of the paper's Table 5; DenseFormer itself mixes after
  whole Transformer blocks, which is period=2, dilation=2 here. The weights are
  unconstrained scalars; a_ii = 1 and the others 0 at init, which is the plain
  residual stream. Which granularity the paper ran, it does not say. Weight
  decay on the scalars is off here, as on every mixer parameter.
  """

  def __init__(
    self,
    num_sublayers: int,
    width: int,
    *,
    norm_eps: float,
    period: int = 1,
    dilation: int = 1,
  ):
    del norm_eps
    super().__init__(num_sublayers, width)
    check_positive("period", period)
    check_positive("dilation", dilation)
    self.period = period
    self.dilation = dilation
    self.scalars = nnx.List(
      [
        DepthParam(jnp.zeros(len(self._picked(i)), jnp.float32).at[-1].set(1.0))
        if self._mixes(i)
        else None
        for i in range(num_sublayers + 1)
      ]
    )

  def sources(self, sublayer):
    """Source X_j is itself a mix of the outputs 0..j."""
    picked = self._picked(sublayer) if self._mixes(sublayer) else [sublayer]
    return tuple(tuple(range(j + 1)) for j in picked)

  def start(self, embedding):
    return DenseState((embedding,), None)

  def open(self, state, block):
    return state, [self._row(l) for l in block]

  def read(self, state, x, norm):
    current = self._mix(state, x)
    return norm(current), state._replace(current=current)

  def write(self, state, x, output):
    newest = state.current + output
    return DenseState((*state.states, newest), None)

  def last(self):
    return self._row(self.num_sublayers)

  def finish(self, state):
    return self._mix(state, self.last())

  def weights(self, state, x):
    row = jnp.ones(1) if x is None else x  # None: no mix here
    b, t = state.states[0].shape[:2]
    return jnp.broadcast_to(row[:, None, None, None], (len(row), b, t, 1))

  def _mixes(self, i: int) -> bool:
    return i > 0 and i % self.period == 0

  def _picked(self, i: int) -> list[int]:
    return list(range(i % self.dilation, i + 1, self.dilation))

  def _row(self, i: int) -> Float[Array, "R"] | None:
    return self.scalars[i][...] if self._mixes(i) else None

  def _mix(self, state: DenseState, row) -> Float[Array, "B T D"]:
    newest = state.states[-1]
    if row is None:
      return newest
    i = len(state.states) - 1
    picked = tuple(state.states[j] for j in self._picked(i))
    weights = jnp.broadcast_to(
      row[:, None, None, None], (len(row), *newest.shape[:2], 1)
    )
    return attention.mix(weights[None], picked)[0].astype(newest.dtype)
