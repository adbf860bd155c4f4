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
from attnres_jax.model.shards import ONE_DEVICE, Shards


class TransformerBlock(nnx.Module):
  """Two sublayers, each behind its PreNorm. No residual connection: the mixer
  is the residual connection."""

  def __init__(self, *, width, heads, kv_heads, head_dim, mlp_hidden,
               rope_theta, qk_norm, norm_eps, dtype, shards,
               rngs):  # fmt: skip
    self.attention_norm = RMSNorm(width, norm_eps)
    self.attention = Attention(
      width, heads, kv_heads, head_dim, rope_theta=rope_theta,
      qk_norm=qk_norm, norm_eps=norm_eps, dtype=dtype, shards=shards,
      rngs=rngs,
    )  # fmt: skip
    self.mlp_norm = RMSNorm(width, norm_eps)
    self.mlp = SwiGLU(width, mlp_hidden, dtype=dtype, shards=shards, rngs=rngs)


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
    shards: Shards,
    rngs: nnx.Rngs,
  ):
    """Args: see the group `model` of configs/train.py; `mixer` is built for
    2 * layers sublayers of this width, `rngs` initialises everything else.
    With `shards`, the model is one device's part and takes the device's own
    tokens; its parameters, as they are made here, are whole."""
    self.dtype = jnp.dtype(dtype)
    self.remat = remat
    self.shards = shards
    self.mixer = mixer
    init = jax.nn.initializers.normal(init_std)

    def table():
      shape = (vocab_size, width)
      return Embedding(init(rngs.params(), shape, jnp.float32), axes="VD")

    self.embedding = table()
    self.blocks = nnx.List(
      [
        TransformerBlock(
          width=width, heads=heads, kv_heads=kv_heads,
          head_dim=head_dim or width // heads, mlp_hidden=mlp_hidden,
          rope_theta=rope_theta, qk_norm=qk_norm, norm_eps=norm_eps,
          dtype=self.dtype, shards=shards, rngs=rngs,
        )
        for _ in range(layers)
      ]
    )  # fmt: skip
    self.final_norm = RMSNorm(width, norm_eps)
    self.head = None if tied_head else table()

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
    shards = self.shards
    table_VD = shards.whole(self.embedding, self.dtype)
    # Float32, so that the backward sums the gradients of a token's row in it.
    h_BTD = table_VD.astype(jnp.float32)[tokens].astype(self.dtype)
    positions, segment_ids = map(shards.stretch, (positions, segment_ids))
    packing = positions, segment_ids, shards.keys(segment_ids)
    sublayers = []
    for block in self.blocks:
      attention = _attend_tokens(block.attention, packing)
      sublayers.append((block.attention_norm, attention))
      sublayers.append((block.mlp_norm, block.mlp))
    h_BTD = base.run(
      self.mixer, h_BTD, sublayers, remat=self.remat, observe=observe
    )
    h_BTD = self.final_norm(h_BTD)
    if self.head is not None:
      table_VD = shards.whole(self.head, self.dtype)
    return jnp.einsum(
      "BTD,VD->BTV", h_BTD, table_VD, preferred_element_type=jnp.float32
    )


def _attend_tokens(attention, packing):
  return lambda x_BTD: attention(x_BTD, *packing)


def build_model(config, seed: int, shards: Shards = ONE_DEVICE) -> Decoder:
  """Builds the decoder of a config (configs/train.py).

  The sublayers draw their initial weights from a stream of their own, so that
  two configs that differ only in the mixer start from the same ones. No mixer
  draws any: all of them start from constants.

  Args:
    config: a ConfigDict with the groups `model` and `mixer`.
    seed: fixes the initial weights.
    shards: of the device program that will run it; as it is, one device.
  """
  model = config.model
  mixer = registry.build(
    num_sublayers=2 * model.layers,
    width=model.width,
    norm_eps=model.norm_eps,
    **config.mixer,
  )
  return Decoder(
    mixer=mixer, shards=shards, rngs=nnx.Rngs(params=seed), **model
  )
