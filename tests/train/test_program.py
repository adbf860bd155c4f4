"""The compiled steps: accumulation, devices, memory, seeds."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnres_jax.errors import UserError
from attnres_jax.model.decoder import build_model
from attnres_jax.parallel import rules
from attnres_jax.train import program as program_lib
from attnres_jax.train.loss import loss_sums
from attnres_kernels.depth_attention import static
from tests.train.conftest import assert_same, micro_config

# float32 sums in another order, after up to three steps.
METRIC_RTOL = 2e-5
# The same for single gradients, which are below 1 and partly cancel.
GRAD_ATOL = 2e-7


def steps(program, batch, count=3):
  state = program.init(0)
  history = []
  for _ in range(count):
    state, metrics = program.train_step(state, batch)
    history.append({k: float(v) for k, v in metrics.items()})
  return state, history


def test_first_step_against_a_plain_one(program, batch):
  """Loss, gradient norm and Adam's direction, without the program."""
  config = program.config
  model = build_model(config, 0)
  graphdef, params = nnx.split(model)

  def loss(params):
    logits = nnx.merge(graphdef, params)(
      batch["tokens"], batch["positions"], batch["segment_ids"]
    )
    sums = loss_sums(logits, batch["targets"], batch["mask"])
    return sums.nll / sums.targets

  value, grads = jax.jit(jax.value_and_grad(loss))(params)
  norm = np.sqrt(
    sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(grads))
  )
  state, metrics = program.train_step(program.init(0), batch)
  np.testing.assert_allclose(metrics["loss"], value, rtol=METRIC_RTOL)
  np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=METRIC_RTOL)
  assert float(metrics["lr"]) == pytest.approx(config.opt.lr / 2)  # warmup 2
  assert int(state.step) == 1
  # One step of Adam moves by lr * sign(g), plus decay of 0.1 * lr * p.
  name = ("mixer", "query", "query")
  before, after = (dict(nnx.to_flat_state(p))[name].get_value()
                   for p in (params, state.params))  # fmt: skip
  grad = dict(nnx.to_flat_state(grads))[name].get_value()
  clipped = grad * min(1.0, 1.0 / norm)
  large = np.abs(clipped) > 1e-5  # eps 1e-8 does not show
  assert large.any()
  np.testing.assert_allclose(
    (after - before)[large],
    -float(metrics["lr"]) * np.sign(clipped)[large],
    rtol=2e-3,
  )


def test_accumulation_changes_nothing(program, batch):
  """Although the microbatches, of one row each, have 31 to 0 targets."""
  config = micro_config()
  config.opt.accumulate = 4
  split = program_lib.compile_program(config)
  state, history = steps(program, batch)
  _, split_history = steps(split, batch)
  for a, b in zip(history, split_history, strict=True):
    assert a == pytest.approx(b, rel=METRIC_RTOL)
  # The first moment after one step is 0.1 times the clipped gradient.
  moments = [steps(p, batch, 1)[0].opt_state[1].mu for p in (program, split)]
  for x, y in zip(*map(jax.tree.leaves, moments), strict=True):
    np.testing.assert_allclose(x, y, atol=GRAD_ATOL)
  np.testing.assert_allclose(
    program.eval_step(state, batch), split.eval_step(state, batch), rtol=1e-5
  )


def test_z_loss_is_reported_apart(program, batch):
  config = micro_config()
  config.opt.z_loss = 1e-3
  with_z = program_lib.compile_program(config)
  _, (first,) = steps(with_z, batch, 1)
  _, (plain,) = steps(program, batch, 1)
  assert first["loss"] == pytest.approx(plain["loss"], rel=1e-6)
  assert first["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-6)
  sums = program.eval_step(program.init(0), batch)
  assert first["z_loss"] == pytest.approx(
    1e-3 * float(sums.z / sums.targets), rel=1e-5
  )
  assert "z_loss" not in plain


def test_init_is_the_models(program):
  for seed in (0, 7):
    state = program.init(seed)
    assert_same(
      jax.tree.map(np.asarray, state.params),
      jax.tree.map(np.asarray, nnx.state(build_model(program.config, seed))),
    )
    assert int(state.step) == 0
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {
    jnp.dtype("float32")
  }


def test_facts_of_a_program(program):
  count = sum(x.size for x in jax.tree.leaves(program.abstract_state.params))
  assert program.num_params == count
  # Parameters and two moments, at least; and not absurdly more.
  assert 3 * 4 * count < program.peak_bytes < 2**30
  assert program.compile_s > 0
  assert "2 sublayers" in program.mixer_description
  assert dict(program.mesh.shape) == dict.fromkeys(rules.AXES, 1)


def test_the_state_is_donated(program, batch):
  state = program.init(0)
  program.train_step(state, batch)
  assert jax.tree.leaves(state.params)[0].is_deleted()


@pytest.mark.parametrize(
  "group, key, value, knob",
  [
    ("mesh", "data", 0, "--config.mesh.data"),
    ("mesh", "data", 99, "--config.mesh.data"),
    ("opt", "accumulate", 3, "--config.opt.accumulate"),
    ("data", "batch_size", 0, "--config.data.batch_size"),
  ],
)
@pytest.mark.fast
def test_errors_come_first(config, monkeypatch, group, key, value, knob):
  monkeypatch.setattr(jax, "jit", None)
  config[group][key] = value
  with pytest.raises(UserError, match=knob) as error:
    program_lib.compile_program(config)
  assert "\n" not in str(error.value)


SHARDED = """
import json
import numpy as np
from attnres_jax.errors import UserError
from attnres_jax.train import program as lib
from tests.train.conftest import micro_config
jax.config.update("jax_compilation_cache_dir", ".cache/jax")

batch = dict(np.load({path!r}))
out = []
for devices, accumulate in ((4, 1), (2, 2)):
  config = micro_config()
  config.mesh.data, config.opt.accumulate = devices, accumulate
  program = lib.compile_program(config)
  assert program.mesh.size == devices
  state = program.init(0)
  for _ in range(3):
    state, metrics = program.train_step(state, batch)
  leaf = jax.tree.leaves(state.params)[0]
  assert leaf.sharding.is_fully_replicated and len(leaf.devices()) == devices
  sums = program.eval_step(state, batch)
  out.append([float(x) for x in (*metrics.values(), *sums)])
config.mesh.data = -1
config.data.batch_size = 6
try:
  lib.compile_program(config)
except UserError as error:
  out.append(str(error))
print(json.dumps(out))
"""


def test_data_parallel_equals_one_device(program, run_python, batch, tmp_path):
  np.savez(tmp_path / "batch.npz", **batch)
  code = SHARDED.replace("{path!r}", repr(str(tmp_path / "batch.npz")))
  four, two, error = json.loads(run_python(code, devices=4))
  state, history = steps(program, batch)
  sums = program.eval_step(state, batch)
  one = [*history[-1].values(), *map(float, sums)]
  np.testing.assert_allclose(four, one, rtol=METRIC_RTOL)
  np.testing.assert_allclose(two, one, rtol=METRIC_RTOL)
  assert "multiple of 8" in error and "--config.data.batch_size" in error


TPU = """
import re
from jax.experimental import topologies
from attnres_jax.train import program as lib
from tests.train.conftest import micro_config

config = micro_config()  # no implementation named: the kernels are the default
config.opt.accumulate = 2
config.data.batch_size = 8
slice_ = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu")
program = lib.lower_program(config, lib.make_mesh(config, slice_.devices))
for step in (program.train_step, program.eval_step):
  text = step.compile().as_text()
  assert "tpu_custom_call" in text
  assert "all-reduce" in text
  assert not re.findall("all-gather|all-to-all|collective-permute", text)
print("compiled")
"""


def test_compiles_for_several_tpus(run_python, monkeypatch):
  """With the depth-attention kernels in it; only sums cross devices."""
  try:
    environment = static.compiler_environment()
  except RuntimeError as error:
    pytest.skip(str(error))
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  assert "compiled" in run_python(TPU, devices=1)


def test_a_row_with_no_targets_at_all(program, batch):
  empty = {**batch, "mask": np.zeros_like(batch["mask"])}
  state, (metrics,) = steps(program, empty, 1)
  assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_program_is_frozen(program):
  with pytest.raises(dataclasses.FrozenInstanceError):
    program.num_params = 0
