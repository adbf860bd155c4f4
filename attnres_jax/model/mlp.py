"""SwiGLU."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from attnres_jax.model.shards import Shards


def kernel(
  rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, *, axes: str
) -> nnx.Param:
  """A float32 kernel, normal with standard deviation 1 / sqrt(fan in).

  Args:
    rngs: draws it.
    shape: of the whole kernel.
    fan_in: inputs that one output sums over.
    axes: a letter per dimension, a line of the table in parallel/rules.py.
  """
  std = fan_in**-0.5
  value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(value, axes=axes)


class SwiGLU(nnx.Module):
  """W_out (silu(W_gate x) * W_up x), each device a part of F.

  Its input and output are the device's own tokens; see `Shards`.
  """

  def __init__(
    self, width: int, hidden: int, *, dtype, shards: Shards, rngs: nnx.Rngs
  ):
    self.gate = kernel(rngs, (width, hidden), width, axes="DF")
    self.up = kernel(rngs, (width, hidden), width, axes="DF")
    self.out = kernel(rngs, (hidden, width), hidden, axes="FD")
    self.dtype = dtype
    self.shards = shards

  def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    gate, up, out = (
      self.shards.whole(w, self.dtype) for w in (self.gate, self.up, self.out)
    )
    x_BTD = self.shards.stretch(x_BTD)
    gate_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, gate)
    up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, up)
    return self.shards.own(
      jnp.einsum("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, out)
    )
