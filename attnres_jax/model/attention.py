"""Causal grouped-query attention over tokens, with RoPE or none."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from attnres_jax.model import token_attention
from attnres_jax.model.mlp import kernel
from attnres_jax.model.norms import RMSNorm


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
  """Grouped-query attention; tokens see earlier ones of their own segment."""

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
    rngs: initialises the kernels.
    """
    self.q = kernel(rngs, (width, heads, head_dim), width)
    self.k = kernel(rngs, (width, kv_heads, head_dim), width)
    self.v = kernel(rngs, (width, kv_heads, head_dim), width)
    self.out = kernel(rngs, (heads, head_dim, width), heads * head_dim)
    self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
    self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
    self.rope_theta = rope_theta
    self.dtype = dtype

  def __call__(
    self,
    x_BTD: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
  ) -> Float[Array, "B T D"]:
    q, k, v, out = (
      w[...].astype(self.dtype) for w in (self.q, self.k, self.v, self.out)
    )
    q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, q)
    k_BSKH = jnp.einsum("BSD,DKH->BSKH", x_BTD, k)
    v_BSKH = jnp.einsum("BSD,DKH->BSKH", x_BTD, v)
    if self.q_norm is not None:
      q_BTNH, k_BSKH = self.q_norm(q_BTNH), self.k_norm(k_BSKH)
    if self.rope_theta:
      q_BTNH = rope(q_BTNH, positions, self.rope_theta)
      k_BSKH = rope(k_BSKH, positions, self.rope_theta)
    mixed_BTNH = token_attention.attend(
      q_BTNH, k_BSKH, v_BSKH, segment_ids, segment_ids
    )
    return jnp.einsum("BTNH,NHD->BTD", mixed_BTNH, out)
