"""Losses and gradients of a batch, as one program per device.

Everything here runs under one `jax.shard_map` over all axes of the mesh: the
compiler could not divide the model's TPU kernels among devices by itself. A
device sums the loss over its own tokens and differentiates that sum. Its
gradients are then sums over its own tokens, and over the heads and channels
that it computed with, so what is left to do is to add up the devices that have
a copy of the same parameter.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from ml_collections import ConfigDict

from attnres_jax.parallel import rules
from attnres_jax.train.loss import LossSums, loss_sums


def make_gradients(config: ConfigDict, graphdef: nnx.GraphDef, mesh: Mesh):
  """(params, batch) -> (LossSums of the batch, gradients of its mean loss).

  The loss is the mean over the targets of the whole batch, z-loss included, so
  uneven masks weigh the same whatever opt.accumulate and the mesh are.

  Args:
    config: of configs/train.py.
    graphdef: of the model with `rules.shards(mesh)`.
    mesh: with the axes of parallel/rules.py.
  """
  z_loss = config.opt.z_loss

  def on_device(params, batch):
    counted = jnp.sum(batch["mask"] != 0, dtype=jnp.float32)
    targets = jnp.maximum(_psum(counted, rules.BATCH, mesh), 1)

    def gradients(micro):
      def objective(params):
        sums = _forward(graphdef, params, micro)
        return (sums.nll + z_loss * sums.z) / targets, sums

      grads, sums = jax.grad(objective, has_aux=True)(params)
      return sums, grads

    zeros = _no_sums(), jax.tree.map(jnp.zeros_like, params)
    sums, grads = _accumulate(gradients, zeros, batch, config.opt.accumulate)
    return _psum(sums, rules.BATCH, mesh), _add_copies(grads, mesh)

  return _on_mesh(on_device, mesh, lambda params: (_no_sums(), params))


def make_losses(config: ConfigDict, graphdef: nnx.GraphDef, mesh: Mesh):
  """(params, batch) -> LossSums of the batch; arguments as above."""

  def on_device(params, batch):
    forward = lambda micro: _forward(graphdef, params, micro)  # noqa: E731
    sums = _accumulate(forward, _no_sums(), batch, config.opt.accumulate)
    return _psum(sums, rules.BATCH, mesh)

  return _on_mesh(on_device, mesh, lambda params: _no_sums())


def _on_mesh(function: Callable, mesh: Mesh, like: Callable) -> Callable:
  """The function of one device's arrays as one of whole arrays.

  Args:
    function: (params, batch) -> result.
    mesh: that it runs on.
    like: params -> a tree like the result, split in the same way.
  """

  def on_mesh(params, batch):
    return jax.shard_map(
      function, mesh=mesh, in_specs=(rules.specs(params), rules.BATCH),
      out_specs=rules.specs(like(params)), check_vma=False,
    )(params, batch)  # fmt: skip

  return on_mesh


def _no_sums() -> LossSums:
  return LossSums(*[jnp.float32(0)] * 3)


def _forward(graphdef, params, micro) -> LossSums:
  model = nnx.merge(graphdef, params)
  logits = model(micro["tokens"], micro["positions"], micro["segment_ids"])
  return loss_sums(logits, micro["targets"], micro["mask"])


def _accumulate(function, zeros, batch: dict, microbatches: int) -> Any:
  """Sums `function(microbatch)`, a tree like `zeros`, over equal parts of the
  rows of a batch."""
  if microbatches == 1:
    return function(batch)

  def split(x_BT):
    """[B, T] -> [microbatches, B / microbatches, T]."""
    return x_BT.reshape(-1, microbatches, x_BT.shape[-1]).swapaxes(0, 1)

  def body(total, micro):
    return jax.tree.map(jnp.add, total, function(micro)), None

  return jax.lax.scan(body, zeros, jax.tree.map(split, batch))[0]


def _add_copies(grads: nnx.State, mesh: Mesh) -> nnx.State:
  """Adds up the gradients of all copies of each parameter, in float32.

  One psum for all parameters with copies along the same axes: the axes that a
  parameter is not split over. Along those that it is split over, gathering it
  was differentiated, which added them up.
  """
  leaves, tree = jax.tree.flatten(grads)
  groups = defaultdict(list)
  for i, spec in enumerate(jax.tree.leaves(rules.specs(grads))):
    groups[frozenset(rules.AXES) - rules.axes_of(spec)].append(i)
  for axes, members in groups.items():
    summed = _psum([leaves[i] for i in members], PartitionSpec(*axes), mesh)
    for i, leaf in zip(members, summed, strict=True):
      leaves[i] = leaf
  return jax.tree.unflatten(tree, leaves)


def _psum(tree: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
  """Sums over the mesh axes of a spec; over one device, nothing."""
  split = rules.axes_of(spec)
  axes = [a for a in rules.AXES if a in split and mesh.shape[a] > 1]
  return jax.lax.psum(tree, tuple(axes)) if axes else tree
