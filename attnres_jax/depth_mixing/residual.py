"""The baseline: a PreNorm residual stream, h_l = h_{l-1} + f(norm(h_{l-1}))."""

import jax.numpy as jnp

from attnres_jax.depth_mixing.base import DepthMixer


class Residual(DepthMixer):
  """The standard residual connection (Table 5, row "Residual").

  The state is the stream itself [B, T, D]: one source, the plain sum of the
  embedding and of every output so far.
  """

  def __init__(self, num_sublayers: int, width: int, *, norm_eps: float):
    del norm_eps  # no norm of its own
    super().__init__(num_sublayers, width)

  def sources(self, sublayer):
    return (tuple(range(sublayer + 1)),)

  def start(self, embedding):
    return embedding

  def read(self, state, x, norm):
    return norm(state), state

  def write(self, state, x, output):
    return state + output

  def finish(self, state):
    return state

  def weights(self, state, x):
    return jnp.ones((1, *state.shape[:2], 1), jnp.float32)
