"""RMSNorm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from attnres_jax.depth_mixing.base import FusableNorm
from attnres_jax.model.params import NormScale


class RMSNorm(FusableNorm, nnx.Module):
  """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32."""

  def __init__(self, width: int, eps: float):
    self.scale = NormScale(jnp.ones((width,), jnp.float32))
    self.eps = eps

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the normalised input, in the input's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(
      jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps
    )
    return (wide * inverse * self.scale[...]).astype(x.dtype)
