"""A dense decoder. It knows the depth-mixing interface and no mechanism."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from attnres_jax.depth_mixing import base, registry
from attnres_jax.model.attention import Attention
from attnres_jax.model.mlp import SwiGLU
from attnres_jax.model.norms import RMSNorm
from attnres_jax.model.params import Embedding


class TransformerBlock(nnx.Module):
  """Two sublayers, each behind its PreNorm. No residual connection: the mixer
  is the residual connection."""

  def __init__(self, *, width, heads, kv_heads, head_dim, mlp_hidden,
               rope_theta, qk_norm, norm_eps, dtype, rngs):  # fmt: skip
    self.attention_norm = RMSNorm(width, norm_eps)
    self.attention = Attention(
      width, heads, kv_heads, head_dim, rope_theta=rope_theta,
      qk_norm=qk_norm, norm_eps=norm_eps, dtype=dtype, rngs=rngs,
    )  # fmt: skip
    self.mlp_norm = RMSNorm(width, norm_eps)
    self.mlp = SwiGLU(width, mlp_hidden, dtype=dtype, rngs=rngs)


class Decoder(nnx.Module):
  """Embedding, 2 * layers sublayers joined by a depth mixer, norm, head."""

  def __init__(
    self,
    *,
    mixer: base.DepthMixer,
    vocab_size: int,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp_hidden: int,
    rope_theta: float,
    qk_norm: bool,
    tied_head: bool,
    norm_eps: float,
    init_std: float,
    dtype: str,
    remat: str,
    rngs: nnx.Rngs,
  ):
    """Args: see the group `model` of configs/train.py; `mixer` is built for
    2 * layers sublayers of this width, `rngs` initialises everything else."""
    self.dtype = jnp.dtype(dtype)
    self.remat = remat
    self.mixer = mixer
    init = jax.nn.initializers.normal(init_std)
    shape = (vocab_size, width)
    self.embedding = Embedding(init(rngs.params(), shape, jnp.float32))
    self.blocks = nnx.List(
      [
        TransformerBlock(
          width=width, heads=heads, kv_heads=kv_heads,
          head_dim=head_dim or width // heads, mlp_hidden=mlp_hidden,
          rope_theta=rope_theta, qk_norm=qk_norm, norm_eps=norm_eps,
          dtype=self.dtype, rngs=rngs,
        )
        for _ in range(layers)
      ]
    )  # fmt: skip
    self.final_norm = RMSNorm(width, norm_eps)
    self.head = (
      None if tied_head else Embedding(init(rngs.params(), shape, jnp.float32))
    )

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    observe: Callable[[int, Float[Array, "R B T H"]], None] | None = None,
  ) -> Float[Array, "B T V"]:
    """Next-token logits, float32.

    Args:
      tokens: ids below vocab_size.
      positions: of each token in its document.
      segment_ids: tokens attend within equal ids.
      observe: receives the depth weights, see `depth_mixing.base.run`.
    """
    h_BTD = self.embedding[tokens].astype(self.dtype)
    sublayers = []
    for block in self.blocks:
      attention = _attend_tokens(block.attention, positions, segment_ids)
      sublayers.append((block.attention_norm, attention))
      sublayers.append((block.mlp_norm, block.mlp))
    h_BTD = base.run(
      self.mixer, h_BTD, sublayers, remat=self.remat, observe=observe
    )
    h_BTD = self.final_norm(h_BTD)
    head = self.embedding if self.head is None else self.head
    return jnp.einsum(
      "BTD,VD->BTV", h_BTD, head[...].astype(self.dtype),
      preferred_element_type=jnp.float32,
    )  # fmt: skip


def _attend_tokens(attention, positions, segment_ids):
  return lambda x_BTD: attention(x_BTD, positions, segment_ids)


def build_model(config, seed: int) -> Decoder:
  """Builds the decoder of a config (configs/train.py).

  The sublayers draw their initial weights from a stream of their own, so that
  two configs that differ only in the mixer start from the same ones. No mixer
  draws any: all of them start from constants.

  Args:
    config: a ConfigDict with the groups `model` and `mixer`.
    seed: fixes the initial weights.
  """
  model = config.model
  mixer = registry.build(
    num_sublayers=2 * model.layers,
    width=model.width,
    norm_eps=model.norm_eps,
    **config.mixer,
  )
  return Decoder(mixer=mixer, rngs=nnx.Rngs(params=seed), **model)
