"""How everything is split over the mesh: the one page of rules.

Mesh axes, outermost first; any may be 1 (parallel/mesh.py makes the mesh):

  data    rows of the batch; the parameters are copied. Slices of a multi-slice
          job are the outer part of it: nothing else crosses the slow network.
  fsdp    rows of the batch as well; parameters and optimizer state are split,
          and every device gathers a weight where it uses it.
  expert  rows of the batch as well, and the experts of a mixture-of-experts
          sublayer; a dense model has none.
  seq     long stretches of the sequence (context parallelism).
  tensor  heads and hidden channels inside a sublayer; between sublayers, tokens
          (sequence parallelism).

The whole gradient runs under one `jax.shard_map` over all five axes
(train/gradients.py), so every line of the model, the TPU kernels included,
sees plain arrays: one device's part. The collectives are written out, in
model/shards.py, and these are all of them:

  attention  all_gather of tokens over tensor -> N and K split over tensor ->
             all_gather of keys and values over seq -> psum_scatter over tensor
  mlp        all_gather of tokens over tensor -> F split over tensor ->
             psum_scatter over tensor
  embedding  all_gather of the table; its own tokens only
  head       the same table, or the head's; its own tokens only
  weights    all_gather over fsdp, in the compute dtype
  loss       psum of three scalars
  gradients  psum over the axes that a parameter is not split over, once a step

and their transposes in the backward pass (all_gather <-> psum_scatter).

*Between* sublayers, where depth is mixed, there is none. The sources, the block
representations, phase-1 results and every merge are [B, T / (seq * tensor), D]
on each device: sequence-sharded over the tensor axis, as section 4.2 of the
paper has it. So a device stores and reads 1 / tensor of the blocks, and its
phase 2 stands between the psum_scatter of a sublayer and the all_gather of the
next one. All of it is per token, so it needs no other device; only the
gradients of queries and key scales, being parameters, are summed at the end.

To add a parameter: give it its axes as letters (attnres_jax/shapes.py), as in
`kernel(..., axes="DF")`, and the table a line if it lacks these letters. A
layer reads it with `Shards.whole`. A dimension that is split over fsdp is put
together by that, and one split over tensor (or expert) alone is what the layer
computes its part with. A parameter without axes (norm scales, everything of a
mixer) is copied to every device and used as it is. Optimizer state is split
like the parameter that it belongs to.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from attnres_jax.errors import UserError
from attnres_jax.model.shards import Shards

P = PartitionSpec

AXES = ("data", "fsdp", "expert", "seq", "tensor")

# Axes of a parameter -> what each dimension is split over.
PARAMETERS = {
  "VD": P(("fsdp", "tensor"), None),  # embedding, head
  "DNH": P("fsdp", "tensor", None),  # queries
  "DKH": P("fsdp", "tensor", None),  # keys, values
  "NHD": P("tensor", None, "fsdp"),  # attention output
  "DF": P("fsdp", "tensor"),  # gate, up
  "FD": P("tensor", "fsdp"),  # MLP output
  "": P(),  # everything else
}

ROWS, TOKENS = ("data", "fsdp", "expert"), ("seq", "tensor")
BATCH = P(ROWS, TOKENS)  # tokens, targets, positions, segment ids, mask
ACTIVATIONS = P(ROWS, TOKENS, None)  # between sublayers, [B, T, D]

# Letter -> config key that sets its size.
KNOBS = {
  "B": "data.batch_size",
  "T": "data.seq_len",
  "D": "model.width",
  "F": "model.mlp_hidden",
  "V": "model.vocab_size",
  "N": "model.heads",
  "K": "model.kv_heads",
}


def shards(mesh: Mesh) -> Shards:
  """What the layers of one device's program need to know of a mesh."""
  sizes = {axis: mesh.shape[axis] for axis in AXES if axis != "data"}
  return Shards(**sizes, splits=tuple(PARAMETERS.items()))


def specs(tree: Any) -> Any:
  """The PartitionSpec of every leaf: parameters, optimizer state, or both.

  Args:
    tree: its nnx variables carry their axes, whatever else it holds is copied.

  Raises:
    TypeError: a parameter has axes that are not in the table.
  """

  def spec(leaf):
    if not isinstance(leaf, nnx.Variable):
      return P()
    axes = leaf.get_metadata("axes", "")
    if axes not in PARAMETERS:
      raise TypeError(
        f"got a parameter with axes {axes!r}: expected one of"
        f" {', '.join(PARAMETERS)}. Add a line to parallel/rules.py."
      )
    return leaf.replace(PARAMETERS[axes])

  return jax.tree.map(spec, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def shardings(tree: Any, mesh: Mesh) -> Any:
  """The NamedSharding of every leaf; see `specs`."""
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree))


def axes_of(spec: PartitionSpec) -> set[str]:
  """Names of the mesh axes that a PartitionSpec splits over."""
  return {axis for names in spec for axis in _tuple(names)}


def check_divides(config: ConfigDict, sizes: Mapping[str, int]) -> None:
  """Checks that the mesh divides everything that it splits.

  Args:
    config: of configs/train.py.
    sizes: devices along every axis of AXES.

  Raises:
    UserError: the first that it does not.
  """
  for letters, spec in {"BT": BATCH, **PARAMETERS}.items():
    for letter, names in zip(letters, spec, strict=True):
      parts = {f"mesh.{name}": sizes[name] for name in _tuple(names)}
      if letter == "B":
        parts["opt.accumulate"] = config.opt.accumulate
      parts = {key: size for key, size in parts.items() if size > 1}
      if parts:
        _check(config, KNOBS[letter], parts)


def _check(config, key, parts) -> None:
  group, name = key.split(".")
  got, total = config[group][name], math.prod(parts.values())
  if got % total:
    product = " x ".join(f"{key} {size}" for key, size in parts.items())
    *knobs, last = (f"--config.{key}" for key in (key, *parts))
    raise UserError(
      f"got {key} {got}: expected a multiple of {total} ({product}). Set"
      f" {', '.join(knobs)} or {last}."
    )


def _tuple(names) -> tuple[str, ...]:
  """An entry of a PartitionSpec as a tuple of mesh axes."""
  return (names,) if isinstance(names, str) else tuple(names or ())
