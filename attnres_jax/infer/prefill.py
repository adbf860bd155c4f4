"""The forward pass of a chunk of a prompt, for any mesh.

Depth mixing looks at one token at a time, so no depth state crosses from one
chunk to the next: what a chunk's block representations take is told by the
forward pass of that chunk. This one attends within the chunk; keys and values
of the tokens before it are not there yet.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from attnres_jax.model.decoder import build_model
from attnres_jax.parallel import rules

INPUTS = ("tokens", "positions", "segment_ids")


def lower_prefill(
  config: ConfigDict, mesh: Mesh
) -> tuple[jax.stages.Lowered, nnx.State]:
  """Traces and lowers the forward pass of a chunk.

  Args:
    config: of configs/train.py; data.batch_size rows of data.seq_len tokens.
    mesh: with the axes of parallel/rules.py; its devices need not be here.

  Returns:
    The function (params, {INPUTS: int32 [B, T]}) -> float32 logits [B, P, V],
    P the parts that the sequence is split into: those behind the last token
    of each, so [:, -1] are those of the next token; and its parameters,
    abstract, what is multiplied with in the compute dtype.
  """
  config = config.copy_and_resolve_references()
  model = nnx.eval_shape(lambda: build_model(config, 0, rules.shards(mesh)))
  graphdef, params = nnx.split(model, nnx.Param)
  specs = rules.specs(params)

  def forward(params, chunk):
    model = nnx.merge(graphdef, params)
    return model(*(chunk[key] for key in INPUTS))[:, -1:]

  def on_mesh(params, chunk):
    return jax.shard_map(
      forward, mesh=mesh, in_specs=(specs, rules.BATCH),
      out_specs=rules.ACTIVATIONS, check_vma=False,
    )(params, chunk)  # fmt: skip

  def place(x, spec):
    kind = x.dtype if x.ndim == 1 else jnp.dtype(config.model.dtype)
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, kind, sharding=sharding)

  placed = jax.tree.map(place, params, specs)
  shape = (config.data.batch_size, config.data.seq_len)
  chunk = dict.fromkeys(
    INPUTS,
    jax.ShapeDtypeStruct(
      shape, jnp.int32, sharding=NamedSharding(mesh, rules.BATCH)
    ),
  )
  return jax.jit(on_mesh).lower(placed, chunk), placed
