"""A config turned into compiled functions: init, train step, eval step."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from attnres_jax.config import validate
from attnres_jax.errors import UserError
from attnres_jax.model.decoder import build_model
from attnres_jax.train import optimizer
from attnres_jax.train.loss import LossSums, loss_sums

AXIS = "data"
BATCH_KEYS = ("tokens", "targets", "positions", "segment_ids", "mask")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
  """Everything that a step changes.

  There is no random key in it: the model draws nothing while it trains, so the
  seed (initial weights, data order) and the data iterator's state fix a run.

  Attributes:
    step: optimizer steps taken, int32.
    params: the model's parameters, float32.
    opt_state: of the optimizer; its moments are float32.
  """

  step: jax.Array
  params: nnx.State
  opt_state: Any


@dataclasses.dataclass(frozen=True)
class Program:
  """The compiled functions of a config; run.seed and data do not matter.

  Attributes:
    config: what it was compiled for.
    graphdef: `nnx.merge(graphdef, state.params)` is the model.
    tx: the optimizer.
    mesh: one axis, `data`.
    abstract_state: TrainState of shapes, with shardings.
    num_params: number of trainable scalars.
    compile_s: seconds to trace, lower and compile both steps; with a warm
      persistent cache, to load them.
    peak_bytes: device memory of the train step on one device: arguments +
      outputs + temporaries - what outputs share with arguments; None where
      the backend does not say.
    mixer_description: sources and boundaries of the depth mixer, one line.
  """

  config: ConfigDict
  graphdef: nnx.GraphDef
  tx: optax.GradientTransformation
  mesh: Mesh
  abstract_state: TrainState
  num_params: int
  compile_s: float
  peak_bytes: int | None
  mixer_description: str
  _init: Callable[[int], TrainState]
  _train_step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
  _eval_step: Callable[..., LossSums]

  def init(self, seed: int) -> TrainState:
    """The state before step 0, on the mesh."""
    return self._init(seed)

  def train_step(
    self, state: TrainState, batch: Mapping[str, np.ndarray]
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step. Does not block.

    Args:
      state: donated: do not use it again.
      batch: this process's part of a batch, int32 [B / processes, T] each.

    Returns:
      The next state; and float32 scalars: `loss` (nats per target, before the
      update, without z-loss), `z_loss` (if opt.z_loss), `grad_norm` (before
      clipping), `lr`.
    """
    return self._train_step(state, self.put(batch))

  def eval_step(
    self, state: TrainState, batch: Mapping[str, np.ndarray]
  ) -> LossSums:
    """Sums over a batch, over all processes. Does not block."""
    return self._eval_step(state.params, self.put(batch))

  def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's part of a batch as arrays on the mesh."""
    sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
    batch = {key: batch[key] for key in BATCH_KEYS}
    if jax.process_count() == 1:
      return jax.device_put(batch, sharding)
    return {
      key: jax.make_array_from_process_local_data(sharding, value)
      for key, value in batch.items()
    }


def make_mesh(
  config: ConfigDict, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """The mesh of a config: its first mesh.data devices along `data`.

  Args:
    config: of configs/train.py.
    devices: to take them from, which need not be here; None: those here.

  Raises:
    UserError: not so many devices, or they do not divide the batch.
  """
  processes = jax.process_count() if devices is None else 1
  devices_there = jax.devices() if devices is None else list(devices)
  available, wanted = len(devices_there), config.mesh.data
  if wanted != -1 and not 1 <= wanted <= available:
    raise UserError(
      f"got mesh.data {wanted}: expected -1 (all) or 1 to {available}, the"
      f" {devices_there[0].platform} devices. Set it with --config.mesh.data."
    )
  devices = available if wanted == -1 else wanted
  if processes > 1 and devices != available:
    raise UserError(
      f"got mesh.data {wanted}: expected -1, all {available} devices, when"
      f" {processes} processes train together. Set it with --config.mesh.data."
    )
  batch, accumulate = config.data.batch_size, config.opt.accumulate
  if batch % (devices * accumulate):
    raise UserError(
      f"got data.batch_size {batch}: expected a multiple of"
      f" {devices * accumulate} ({devices} devices x opt.accumulate"
      f" {accumulate}). Set --config.data.batch_size, --config.mesh.data or"
      " --config.opt.accumulate."
    )
  return jax.make_mesh(
    (devices,), (AXIS,), axis_types=(AxisType.Auto,),
    devices=devices_there[:devices],
  )  # fmt: skip


def parameter_table(config: ConfigDict) -> str:
  """What the optimizer does with each parameter, and the depth mixer's line.

  Raises:
    UserError: something in the config is wrong.
  """
  validate(config)
  model = nnx.eval_shape(lambda: build_model(config, 0))
  params = nnx.state(model, nnx.Param)
  lines = [f"{'parameter':40} {'shape':18} {'role':10}  decayed  learning rate"]
  for row in optimizer.describe(params, config.opt):
    shape = " x ".join(map(str, row.shape))
    decayed = "yes" if row.decayed else "no"
    lines.append(
      f"{row.path:40} {shape:18} {row.role:10}  {decayed:7}"
      f"  x {row.lr_multiplier:g}"
    )
  total = sum(x.size for x in jax.tree.leaves(params))
  return "\n".join([*lines, f"{total:,} in all", model.mixer.describe()])


def compile_program(config: ConfigDict) -> Program:
  """Compiles a config ahead of time, for the devices that are there.

  Raises:
    UserError: something in the config is wrong; nothing has been compiled.
  """
  start = time.perf_counter()
  validate(config)
  mesh = make_mesh(config)
  lowered = lower_program(config, mesh)
  train_step = lowered.train_step.compile()
  eval_step = lowered.eval_step.compile()
  return Program(
    config=lowered.config,
    graphdef=lowered.graphdef,
    tx=lowered.tx,
    mesh=mesh,
    abstract_state=lowered.abstract_state,
    num_params=sum(
      x.size for x in jax.tree.leaves(lowered.abstract_state.params)
    ),
    compile_s=time.perf_counter() - start,
    peak_bytes=_peak_bytes(train_step),
    mixer_description=lowered.mixer_description,
    _init=lowered.init,
    _train_step=train_step,
    _eval_step=eval_step,
  )


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A config traced for a mesh, whose devices need not be here.

  Attributes:
    config, graphdef, tx, abstract_state, mixer_description: as in `Program`.
    init: makes the state before step 0 from a seed.
    train_step: lowered; `compile()` makes what `Program.train_step` calls.
    eval_step: lowered.
  """

  config: ConfigDict
  graphdef: nnx.GraphDef
  tx: optax.GradientTransformation
  abstract_state: TrainState
  mixer_description: str
  init: Callable[[int], TrainState]
  train_step: jax.stages.Lowered
  eval_step: jax.stages.Lowered


def lower_program(config: ConfigDict, mesh: Mesh) -> Lowered:
  """Traces and lowers both steps of a valid config for a mesh."""
  config = config.copy_and_resolve_references()
  replicated = NamedSharding(mesh, PartitionSpec())

  model = nnx.eval_shape(lambda: build_model(config, 0))
  graphdef, abstract_params, rest = nnx.split(model, nnx.Param, ...)
  if jax.tree.leaves(rest):
    raise TypeError(f"the model has state that is not nnx.Param: {rest}")
  tx = optimizer.build(config.opt, config.run.steps, abstract_params)

  def init_state(params):
    return TrainState(jnp.int32(0), params, tx.init(params))

  def init(seed):
    # Not compiled: it runs once, and compiled it takes longer. The weights are
    # those of `build_model`, to the bit.
    params = nnx.state(build_model(config, seed), nnx.Param)
    return jax.device_put(init_state(params), replicated)

  abstract_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
    jax.eval_shape(init_state, abstract_params),
  )
  shape = (config.data.batch_size, config.data.seq_len)
  abstract_batch = dict.fromkeys(
    BATCH_KEYS,
    jax.ShapeDtypeStruct(
      shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(AXIS))
    ),
  )
  train_step, eval_step = _make_steps(config, graphdef, tx, mesh)
  return Lowered(
    config=config,
    graphdef=graphdef,
    tx=tx,
    abstract_state=abstract_state,
    mixer_description=model.mixer.describe(),
    init=init,
    train_step=jax.jit(
      train_step, donate_argnums=0, out_shardings=replicated
    ).lower(abstract_state, abstract_batch),
    eval_step=jax.jit(eval_step, out_shardings=replicated).lower(
      abstract_state.params, abstract_batch
    ),
  )


def _make_steps(config, graphdef, tx, mesh):
  """The two step functions, not compiled."""
  accumulate, z_loss = config.opt.accumulate, config.opt.z_loss
  lr = optimizer.schedule(config.opt, config.run.steps)

  def split(x_BT):
    """[B, T] -> [microbatches, B / microbatches, T]."""
    return x_BT.reshape(-1, accumulate, x_BT.shape[-1]).swapaxes(0, 1)

  def forward(params, micro):
    model = nnx.merge(graphdef, params)
    logits = model(micro["tokens"], micro["positions"], micro["segment_ids"])
    return loss_sums(logits, micro["targets"], micro["mask"])

  def sum_over_batch(function, zeros, constants, batch):
    """Sums `function(constants, microbatch)`, a pytree like `zeros`.

    Every device runs its own rows, in `accumulate` microbatches, and sees one
    device only: the compiler could not divide the TPU kernels of the model
    among devices by itself.
    """

    def on_device(constants, batch):
      def body(total, micro):
        return jax.tree.map(jnp.add, total, function(constants, micro)), None

      if accumulate == 1:
        total = function(constants, batch)
      else:
        total = jax.lax.scan(body, zeros, jax.tree.map(split, batch))[0]
      return jax.lax.psum(total, AXIS)

    return jax.shard_map(
      on_device, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec(AXIS)),
      out_specs=PartitionSpec(), check_vma=False,
    )(constants, batch)  # fmt: skip

  no_sums = LossSums(*[jnp.float32(0)] * 3)

  def train_step(state, batch):
    # Every microbatch divides by the targets of the whole batch, so uneven
    # masks weigh the same whatever opt.accumulate is.
    targets = jnp.maximum(jnp.sum(batch["mask"] != 0, dtype=jnp.float32), 1)

    def gradients(constants, micro):
      params, targets = constants

      def objective(params):
        sums = forward(params, micro)
        return (sums.nll + z_loss * sums.z) / targets, sums

      grads, sums = jax.grad(objective, has_aux=True)(params)
      return sums, grads

    zeros = no_sums, jax.tree.map(jnp.zeros_like, state.params)
    sums, grads = sum_over_batch(
      gradients, zeros, (state.params, targets), batch
    )
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    metrics = dict(
      loss=sums.nll / targets,
      grad_norm=optimizer.global_norm(grads),
      lr=lr(state.step),
    )
    if z_loss:
      metrics["z_loss"] = z_loss * sums.z / targets
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), metrics

  def eval_step(params, batch):
    return sum_over_batch(forward, no_sums, params, batch)

  return train_step, eval_step


def _peak_bytes(compiled) -> int | None:
  stats = compiled.memory_analysis()
  if stats is None:
    return None
  return (
    stats.argument_size_in_bytes
    + stats.output_size_in_bytes
    + stats.temp_size_in_bytes
    - stats.alias_size_in_bytes
  )
