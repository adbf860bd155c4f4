"""Causal grouped-query attention over tokens, with RoPE or none."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from attnres_jax.model import token_attention
from attnres_jax.model.mlp import kernel
from attnres_jax.model.norms import RMSNorm
from attnres_jax.model.shards import Shards


def rope(
  x_BTNH: Float[Array, "B T N H"], positions: Int[Array, "B T"], theta: float
) -> Float[Array, "B T N H"]:
  """Rotates the pairs (i, i + H / 2) by position * theta^(-2 i / H)."""
  half = x_BTNH.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[:, :, None, None].astype(jnp.float32) * frequency
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x_BTNH.dtype)


class Attention(nnx.Module):
  """Grouped-query attention; tokens see earlier ones of their own segment.

  Each device has a part of the heads N and K and a stretch of the queries; its
  input and output are the device's own tokens. See `Shards`.
  """

  def __init__(
    self,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    rope_theta: float,
    qk_norm: bool,
    norm_eps: float,
    dtype,
    shards: Shards,
    rngs: nnx.Rngs,
  ):
    """Args:
    width: D.
    heads: N.
    kv_heads: K, divides N.
    head_dim: H.
    rope_theta: base of the rotary embedding; 0: no positional encoding.
    qk_norm: RMSNorm over the head dim of queries and keys.
    norm_eps: of the RMSNorm.
    dtype: of the computation.
    shards: of the program that it runs in.
    rngs: initialises the kernels.
    """
    self.q = kernel(rngs, (width, heads, head_dim), width, axes="DNH")
    self.k = kernel(rngs, (width, kv_heads, head_dim), width, axes="DKH")
    self.v = kernel(rngs, (width, kv_heads, head_dim), width, axes="DKH")
    self.out = kernel(
      rngs, (heads, head_dim, width), heads * head_dim, axes="NHD"
    )
    self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
    self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
    self.rope_theta = rope_theta
    self.dtype = dtype
    self.shards = shards

  def __call__(
    self,
    x_BtD: Float[Array, "B t D"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    key_segment_ids: Int[Array, "B S"],
  ) -> Float[Array, "B t D"]:
    """Attention of the device's own tokens t, a part of its stretch T of S.

    Args:
      x_BtD: input.
      positions: of the stretch, each in its document.
      segment_ids: of the stretch.
      key_segment_ids: of the whole sequence.
    """
    shards = self.shards
    q, k, v, out = (
      shards.whole(w, self.dtype) for w in (self.q, self.k, self.v, self.out)
    )
    x_BTD = shards.stretch(x_BtD)
    q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, q)
    k_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, k)
    v_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, v)
    if self.q_norm is not None:
      q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
    if self.rope_theta:
      q_BTNH = rope(q_BTNH, positions, self.rope_theta)
      k_BTKH = rope(k_BTKH, positions, self.rope_theta)
    mixed_BTNH = token_attention.attend(
      q_BTNH,
      shards.keys(k_BTKH),
      shards.keys(v_BTKH),
      segment_ids,
      key_segment_ids,
      shards.start(q_BTNH.shape[1]),
    )
    return shards.own(jnp.einsum("BTNH,NHD->BTD", mixed_BTNH, out))
