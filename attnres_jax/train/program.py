"""A config turned into compiled functions: init, train step, eval step."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from attnres_jax.config import validate
from attnres_jax.model.decoder import build_model
from attnres_jax.parallel import rules
from attnres_jax.parallel.mesh import make_mesh
from attnres_jax.train import optimizer
from attnres_jax.train.gradients import make_gradients, make_losses
from attnres_jax.train.loss import LossSums

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
    graphdef: `nnx.merge(graphdef, state.params)` is the model on whole arrays,
      for use outside the steps.
    tx: the optimizer.
    mesh: with the axes of parallel/rules.py.
    abstract_state: TrainState of shapes, with shardings; what a checkpoint is
      restored onto, whatever mesh it was saved from.
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
      batch: this process's rows of a batch, int32 [B / processes, T] each.

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
    """This process's rows of a batch as arrays on the mesh."""
    sharding = NamedSharding(self.mesh, rules.BATCH)
    batch = {key: batch[key] for key in BATCH_KEYS}
    if jax.process_count() == 1:
      return jax.device_put(batch, sharding)
    return {
      key: jax.make_array_from_process_local_data(sharding, value)
      for key, value in batch.items()
    }


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

  def abstract(*shards):
    model = nnx.eval_shape(lambda: build_model(config, 0, *shards))
    return model, *nnx.split(model, nnx.Param, ...)

  model, graphdef, abstract_params, rest = abstract()
  if jax.tree.leaves(rest):
    raise TypeError(f"the model has state that is not nnx.Param: {rest}")
  _, device_graphdef, _, _ = abstract(rules.shards(mesh))
  tx = optimizer.build(config.opt, config.run.steps, abstract_params)

  def init_state(params):
    return TrainState(jnp.int32(0), params, tx.init(params))

  abstract_state = jax.eval_shape(init_state, abstract_params)
  shardings = rules.shardings(abstract_state, mesh)
  replicated = NamedSharding(mesh, PartitionSpec())

  def init(seed):
    # Not compiled: it runs once, and compiled it takes longer. The weights are
    # those of `build_model`, to the bit, whatever the mesh is; they are made in
    # the host's memory, since one device may be too small for all of them.
    with jax.default_device(_host()):
      params = nnx.state(build_model(config, seed), nnx.Param)
    # The moments are split like the parameters as soon as they are made.
    params = jax.tree.map(_place, params, shardings.params)
    return jax.tree.map(_place, init_state(params), shardings)

  abstract_state = jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    abstract_state, shardings,
  )  # fmt: skip
  abstract_batch = dict.fromkeys(
    BATCH_KEYS,
    jax.ShapeDtypeStruct(
      (config.data.batch_size, config.data.seq_len), jnp.int32,
      sharding=NamedSharding(mesh, rules.BATCH),
    ),
  )  # fmt: skip
  gradients = make_gradients(config, device_graphdef, mesh)
  losses = make_losses(config, device_graphdef, mesh)
  return Lowered(
    config=config,
    graphdef=graphdef,
    tx=tx,
    abstract_state=abstract_state,
    mixer_description=model.mixer.describe(),
    init=init,
    train_step=jax.jit(
      _make_train_step(config, tx, gradients), donate_argnums=0,
      out_shardings=(shardings, replicated),
    ).lower(abstract_state, abstract_batch),
    eval_step=jax.jit(losses, out_shardings=replicated).lower(
      abstract_state.params, abstract_batch
    ),
  )  # fmt: skip


def _host() -> jax.Device:
  """The device that is the host's own memory, if JAX has it."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # JAX_PLATFORMS leaves it out
    return jax.local_devices()[0]


def _place(x: jax.Array, sharding: NamedSharding) -> jax.Array:
  """An array that every process has, on the mesh."""
  if x.sharding == sharding:
    return x
  value = np.asarray(x)
  return jax.make_array_from_callback(x.shape, sharding, value.__getitem__)


def _make_train_step(config, tx, gradients):
  """The step function, not compiled.

  The optimizer is outside the shard_map: all it does is elementwise on split
  arrays, but for the gradient's norm, which the compiler sums over devices.
  """
  z_loss = config.opt.z_loss
  lr = optimizer.schedule(config.opt, config.run.steps)

  def train_step(state, batch):
    sums, grads = gradients(state.params, batch)
    targets = jnp.maximum(sums.targets, 1)
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

  return train_step


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
