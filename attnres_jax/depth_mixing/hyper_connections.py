"""mHC (arXiv:2512.24880), mHC-lite (arXiv:2601.05732): M parallel streams."""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnres_jax.depth_mixing import attention
from attnres_jax.depth_mixing.attention import HIGHEST
from attnres_jax.depth_mixing.base import (
  DepthMixer,
  DepthParam,
  check_positive,
)
from attnres_jax.errors import UserError

SINKHORN_STEPS = 20  # t_max of the mHC paper
GATE_INIT = 0.01  # a of the mHC paper
OFF_INIT = -8.0  # logit of every stream mapping that is not the identity


class HyperState(NamedTuple):
  """Attributes:
  streams: the columns of H_l, M separate arrays.
  mixing: row m: how the streams (residual) and, last, the coming output (post)
    enter stream m; None before the read.
  """

  streams: tuple[Float[Array, "B T D"], ...]
  mixing: Float[Array, "B T M M+1"] | None


class HyperSlice(NamedTuple):
  """One sublayer's projection, gates (pre, post, residual) and biases."""

  projection: Float[Array, "C K"]
  gates: Float[Array, "3"]
  bias: Float[Array, "K"]


class MHC(DepthMixer):
  """Manifold-constrained hyper-connections, once per sublayer.

    x' = RMSNorm(vec(H));  z = x' phi, in three parts
    pre      = sigmoid(a_pre z_pre + b_pre)          h = sum_m pre_m H_m
    post     = 2 sigmoid(a_post z_post + b_post)
    residual = Sinkhorn(exp(a_res z_res + b_res))    H <- residual H + post y

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
    check_positive("streams", streams)
    self.streams = streams
    self.norm_eps = norm_eps
    m, n = streams, num_sublayers
    identity = self._residual_bias()
    outputs = 2 * m + identity.size
    self.projection = DepthParam(
      jnp.zeros((n, m * width, outputs), jnp.float32)
    )
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
    return HyperState((embedding,) * self.streams, None)

  def open(self, state, block):
    return state, [
      HyperSlice(self.projection[l], self.gates[l], self.bias[l]) for l in block
    ]

  def read(self, state, x, norm):
    pre_BTM, mixing = self._coefficients(state, x)
    weights_QRBTH = jnp.moveaxis(pre_BTM, -1, 0)[None, ..., None]
    (h_BTD,) = attention.mix(weights_QRBTH, state.streams)
    return norm(h_BTD.astype(state.streams[0].dtype)), HyperState(
      state.streams, mixing
    )

  def write(self, state, x, output):
    weights_QRBTH = jnp.moveaxis(state.mixing, (2, 3), (0, 1))[..., None]
    streams = attention.mix(weights_QRBTH, (*state.streams, output))
    return HyperState(tuple(h.astype(output.dtype) for h in streams), None)

  def finish(self, state):
    total = sum(h.astype(jnp.float32) for h in state.streams)
    return total.astype(state.streams[0].dtype)

  def weights(self, state, x):
    if x is None:
      shape = (self.streams, *state.streams[0].shape[:2], 1)
      return jnp.ones(shape, jnp.float32)
    pre_BTM, _ = self._coefficients(state, x)
    return jnp.moveaxis(pre_BTM, -1, 0)[..., None]

  def _coefficients(self, state, x):
    m = self.streams
    streams = [h.astype(jnp.float32) for h in state.streams]
    square = sum(jnp.mean(h * h, axis=-1, keepdims=True) for h in streams) / m
    inverse = jax.lax.rsqrt(square + self.norm_eps)
    parts = jnp.split(x.projection, m)  # rows of phi, stream by stream
    z_BTK = inverse * sum(
      jnp.dot(h, phi, precision=HIGHEST)
      for h, phi in zip(streams, parts, strict=True)
    )
    pre, post, residual = jnp.split(z_BTK, (m, 2 * m), axis=-1)
    b_pre, b_post, b_residual = jnp.split(x.bias, (m, 2 * m))
    pre = jax.nn.sigmoid(x.gates[0] * pre + b_pre)
    post = 2 * jax.nn.sigmoid(x.gates[1] * post + b_post)
    residual = self._residual(x.gates[2] * residual + b_residual)
    return pre, jnp.concatenate([residual, post[..., None]], axis=-1)

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
