"""mHC (arXiv:2512.24880) and mHC-lite (arXiv:2601.05732): M parallel streams."""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnres_jax.depth_mixing.attention import HIGHEST, inverse_rms
from attnres_jax.depth_mixing.base import DepthMixer, DepthParam
from attnres_jax.errors import UserError

SINKHORN_STEPS = 20  # t_max of the mHC paper
GATE_INIT = 0.01  # a of the mHC paper
OFF_INIT = -8.0  # logit of every stream mapping that is not the identity


class HyperState(NamedTuple):
  """Attributes:
  streams: H_l.
  post: how the coming output enters each stream; None before the read.
  residual: how the streams mix; None before the read.
  """

  streams: Float[Array, "B T M D"]
  post: Float[Array, "B T M"] | None
  residual: Float[Array, "B T M M"] | None


class HyperSlice(NamedTuple):
  """One sublayer's projection, gates (pre, post, residual) and biases."""

  projection: Float[Array, "C K"]
  gates: Float[Array, "3"]
  bias: Float[Array, "K"]


class MHC(DepthMixer):
  """Manifold-constrained hyper-connections, once per sublayer.

    x' = RMSNorm(vec(H));  z = x' phi, in three parts
    pre      = sigmoid(a_pre z_pre + b_pre)              h = sum_m pre_m H_m
    post     = 2 sigmoid(a_post z_post + b_post)
    residual = Sinkhorn(exp(a_res z_res + b_res))        H <- residual H + post y

  Sinkhorn divides by column sums, then by row sums, 20 times, so that the
  matrix is doubly stochastic. Coefficients are float32. The norm's scale is
  absorbed into phi. Where the paper is silent: phi = 0; the biases of pre and
  post are +1 on stream (l mod M) and -1 elsewhere; b_res is 0 on the diagonal
  and -8 off it; every stream starts as the embedding; the output is the sum of
  the streams (its scale is lost in the final norm).
  """

  def __init__(
    self, num_sublayers: int, width: int, *, norm_eps: float, streams: int = 4
  ):
    super().__init__(num_sublayers, width)
    if streams < 1:
      raise UserError(
        f"got streams {streams}: expected an integer >= 1. Set it with"
        " --config.mixer.streams."
      )
    self.streams = streams
    self.norm_eps = norm_eps
    m, n = streams, num_sublayers
    identity = self._residual_bias()
    outputs = 2 * m + identity.size
    self.projection = DepthParam(jnp.zeros((n, m * width, outputs), jnp.float32))
    self.gates = DepthParam(jnp.full((n, 3), GATE_INIT, jnp.float32))
    chosen = 2.0 * np.eye(m)[np.arange(n) % m] - 1.0  # [L, M]
    bias = np.concatenate(
      [chosen, chosen, np.tile(identity.ravel(), (n, 1))], axis=1
    )
    self.bias = DepthParam(jnp.asarray(bias, jnp.float32))

  def sources(self, sublayer):
    """Source m is stream m, a mix of all outputs so far."""
    return (tuple(range(sublayer + 1)),) * self.streams

  def start(self, embedding):
    streams = jnp.repeat(embedding[:, :, None], self.streams, axis=2)
    return HyperState(streams, None, None)

  def open(self, state, block):
    return state, [
      HyperSlice(self.projection[l], self.gates[l], self.bias[l]) for l in block
    ]

  def read(self, state, x, norm):
    pre_BTM, post_BTM, residual_BTMM = self._coefficients(state, x)
    streams = state.streams.astype(jnp.float32)
    h_BTD = (pre_BTM[..., None] * streams).sum(2).astype(state.streams.dtype)
    return norm(h_BTD), HyperState(state.streams, post_BTM, residual_BTMM)

  def write(self, state, x, output):
    streams = state.streams.astype(jnp.float32)
    new = state.post[..., None] * output.astype(jnp.float32)[:, :, None]
    for m in range(self.streams):  # M is small: elementwise beats a tiny matmul
      new += state.residual[..., m, None] * streams[:, :, None, m]
    return HyperState(new.astype(state.streams.dtype), None, None)

  def finish(self, state):
    total = state.streams.astype(jnp.float32).sum(2)
    return total.astype(state.streams.dtype)

  def weights(self, state, x):
    b, t, m, _ = state.streams.shape
    if x is None:
      return jnp.ones((m, b, t, 1), jnp.float32)
    pre_BTM, _, _ = self._coefficients(state, x)
    return jnp.moveaxis(pre_BTM, -1, 0)[..., None]

  def _coefficients(self, state, x):
    m = self.streams
    flat = state.streams.reshape(*state.streams.shape[:2], -1)
    normed = flat.astype(jnp.float32) * inverse_rms(flat, self.norm_eps)
    z = jnp.einsum("BTC,CK->BTK", normed, x.projection, precision=HIGHEST)
    pre, post, residual = jnp.split(z, (m, 2 * m), axis=-1)
    b_pre, b_post, b_residual = jnp.split(x.bias, (m, 2 * m))
    pre = jax.nn.sigmoid(x.gates[0] * pre + b_pre)
    post = 2 * jax.nn.sigmoid(x.gates[1] * post + b_post)
    residual = self._residual(x.gates[2] * residual + b_residual)
    return pre, post, residual

  def _residual_bias(self) -> np.ndarray:
    return OFF_INIT * (1 - np.eye(self.streams))

  def _residual(self, logits: Float[Array, "B T K"]) -> Float[Array, "B T M M"]:
    m = self.streams
    return sinkhorn(logits.reshape(*logits.shape[:-1], m, m))


class MHCLite(MHC):
  """mHC whose residual matrix is a softmax mixture of all M! permutations.

  Exactly doubly stochastic without an iteration. The identity's bias is 0 and
  every other permutation's is -8, as in the authors' code.
  """

  def __init__(self, num_sublayers, width, *, norm_eps, streams: int = 4):
    if streams > 6:
      raise UserError(
        f"got streams {streams}: mhc_lite mixes streams! permutations, expected"
        " at most 6. Set it with --config.mixer.streams."
      )
    super().__init__(num_sublayers, width, norm_eps=norm_eps, streams=streams)

  def _residual_bias(self):
    bias = np.full(math.factorial(self.streams), OFF_INIT)
    bias[0] = 0.0  # itertools.permutations starts with the identity
    return bias

  def _residual(self, logits):
    m = self.streams
    permutations = np.stack(
      [np.eye(m)[list(p)] for p in itertools.permutations(range(m))]
    )
    mixture = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum(
      "BTK,KMN->BTMN", mixture, permutations.astype(np.float32),
      precision=HIGHEST,
    )  # fmt: skip


def sinkhorn(
  logits: Float[Array, "... M M"], steps: int = SINKHORN_STEPS
) -> Float[Array, "... M M"]:
  """exp(logits), then `steps` times: columns to sum 1, rows to sum 1.

  In the log domain, so that no logit can overflow.
  """

  def step(z, _):
    z = z - jax.nn.logsumexp(z, axis=-2, keepdims=True)
    return z - jax.nn.logsumexp(z, axis=-1, keepdims=True), None

  return jnp.exp(jax.lax.scan(step, logits, length=steps)[0])
