"""SwiGLU."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def kernel(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param:
  """A float32 kernel, normal with standard deviation 1 / sqrt(fan in)."""
  std = fan_in**-0.5
  return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class SwiGLU(nnx.Module):
  """W_out (silu(W_gate x) * W_up x)."""

  def __init__(self, width: int, hidden: int, *, dtype, rngs: nnx.Rngs):
    self.gate = kernel(rngs, (width, hidden), width)
    self.up = kernel(rngs, (width, hidden), width)
    self.out = kernel(rngs, (hidden, width), hidden)
    self.dtype = dtype

  def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    gate, up, out = (
      w[...].astype(self.dtype) for w in (self.gate, self.up, self.out)
    )
    gate_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, gate)
    up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, up)
    return jnp.einsum("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, out)
