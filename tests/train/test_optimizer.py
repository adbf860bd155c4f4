"""Schedule, roles, clipping: what each parameter gets."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attnres_jax.depth_mixing.base import DepthParam
from attnres_jax.model.decoder import build_model
from attnres_jax.model.params import Embedding, NormScale
from attnres_jax.train import optimizer
from configs.train import get_config

pytestmark = pytest.mark.fast


@pytest.fixture
def opt():
  return get_config("block,size=micro").opt


@pytest.fixture(scope="module")
def params():
  """One variable of each role; all of rank 2, to tempt a rule by rank."""
  ones = jnp.ones((2, 3), jnp.float32)
  return nnx.State(
    {
      "query": DepthParam(ones),
      "norm": NormScale(ones),
      "table": Embedding(ones),
      "kernel": nnx.Param(ones),
    }
  )


def updated(opt, params, grads, steps=100):
  tx = optimizer.build(opt, steps, params)
  updates, _ = tx.update(grads, tx.init(params), params)
  return {
    path[0]: np.asarray(variable.get_value())
    for path, variable in nnx.to_flat_state(
      optax.apply_updates(params, updates)
    )
  }


def test_schedule(opt):
  opt.lr, opt.warmup_steps, opt.min_lr_ratio = 1.0, 4, 0.1
  lr = optimizer.schedule(opt, 12)
  values = [float(lr(step)) for step in range(12)]
  np.testing.assert_allclose(values[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
  for step in range(4, 12):
    cosine = 0.5 * (1 + np.cos(np.pi * (step + 1 - 4) / 8))
    assert values[step] == pytest.approx(0.1 + 0.9 * cosine, rel=1e-5)
  assert values[-1] == pytest.approx(0.1)
  assert float(lr(10_000)) == pytest.approx(0.1)


@pytest.mark.parametrize("warmup, steps", [(0, 1), (0, 5), (5, 5), (1, 1)])
def test_schedule_at_its_limits(opt, warmup, steps):
  opt.lr, opt.warmup_steps = 1.0, warmup
  lr = optimizer.schedule(opt, steps)
  values = [float(lr(step)) for step in range(steps)]
  assert all(0.1 - 1e-6 <= v <= 1 for v in values)
  assert values[-1] == pytest.approx(1.0 if warmup == steps else 0.1)


def test_decay_goes_by_role(opt, params):
  opt.weight_decay = 0.1
  zeros = jax.tree.map(jnp.zeros_like, params)
  after = updated(opt, params, zeros)
  np.testing.assert_array_equal(after["query"], 1)
  np.testing.assert_array_equal(after["norm"], 1)
  lr = float(optimizer.schedule(opt, 100)(0))
  for name in ("table", "kernel"):
    np.testing.assert_allclose(after[name], 1 - 0.1 * lr, rtol=1e-6)


def test_multiplier_scales_the_mixer_alone(opt, params):
  opt.weight_decay = 0.0
  grads = jax.tree.map(lambda x: 0.3 * x, params)
  before = updated(opt, params, grads)
  opt.mixer_lr_multiplier = 5.0
  after = updated(opt, params, grads)
  np.testing.assert_allclose(
    1 - after["query"], 5 * (1 - before["query"]), rtol=1e-5
  )
  for name in ("norm", "table", "kernel"):
    np.testing.assert_array_equal(after[name], before[name])


def test_is_adamw(opt, params):
  """Against optax's own, with its mask made by hand, over several steps."""
  opt.clip_norm = 0.0
  mask = jax.tree.unflatten(
    jax.tree.structure(params), [r.decayed for r in optimizer.roles(params)]
  )
  theirs = optax.adamw(
    optimizer.schedule(opt, 100), opt.b1, opt.b2, opt.eps,
    weight_decay=opt.weight_decay, mask=mask,
  )  # fmt: skip
  ours = optimizer.build(opt, 100, params)
  a = b = params
  state_a, state_b = ours.init(a), theirs.init(b)
  for step in range(3):
    grads = jax.tree.map(lambda x, s=step: jnp.cos(x * (s + 1)), params)
    up_a, state_a = ours.update(grads, state_a, a)
    up_b, state_b = theirs.update(grads, state_b, b)
    a, b = optax.apply_updates(a, up_a), optax.apply_updates(b, up_b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6)


def test_clip_norm_is_float32():
  """Squares of bfloat16 gradients would be rounded to 8 bits, their sum too."""
  rng = np.random.default_rng(0)
  tree = {
    "a": jnp.array(rng.normal(size=(200, 50)), jnp.bfloat16),
    "b": jnp.array(rng.normal(size=3000), jnp.bfloat16),
  }
  exact = np.sqrt(
    sum((np.asarray(x, np.float64) ** 2).sum() for x in tree.values())
  )
  norm = optimizer.global_norm(tree)
  assert norm.dtype == jnp.float32
  np.testing.assert_allclose(norm, exact, rtol=1e-6)

  clip = optimizer.clip_by_global_norm(1.0)
  clipped, _ = clip.update(tree, clip.init(tree))
  assert clipped["a"].dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(clipped["b"], np.float64),
    np.asarray(tree["b"], np.float64) / exact,
    rtol=2**-7,  # of the bfloat16 result
  )


def test_clipping_leaves_small_gradients_alone():
  grads = {"a": jnp.array([0.3, 0.4])}
  for limit in (0.6, 0.0):  # 0: off
    clip = optimizer.clip_by_global_norm(limit)
    clipped, _ = clip.update(grads, clip.init(grads))
    np.testing.assert_array_equal(clipped["a"], grads["a"])


def test_moments_are_float32(opt, params):
  state = optimizer.build(opt, 10, params).init(params)
  kinds = {x.dtype for x in jax.tree.leaves(state)}
  assert kinds == {jnp.dtype("float32"), jnp.dtype("int32")}  # int32: counts


def test_small_updates_are_not_swallowed(opt, params):
  """1000 steps of 1e-4 move a norm scale by 0.1; bfloat16 would not move."""
  opt.lr, opt.warmup_steps, opt.min_lr_ratio = 1e-4, 0, 1.0
  tx = optimizer.build(opt, 1000, params)

  def step(carry, _):
    params, state = carry
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  carry, _ = jax.jit(
    lambda c: jax.lax.scan(step, c, length=1000)
  )((params, tx.init(params)))  # fmt: skip
  np.testing.assert_allclose(carry[0]["norm"].get_value(), 0.9, atol=1e-3)


def test_an_unknown_type_has_to_be_decided_about():
  class Surprise(nnx.Param):
    pass

  state = nnx.State({"x": Surprise(jnp.ones(2))})
  with pytest.raises(TypeError, match="Surprise"):
    optimizer.roles(state)


@pytest.mark.parametrize("mixer", ["residual", "block", "full", "mhc"])
def test_every_parameter_of_a_model_has_its_role(mixer):
  config = get_config(f"{mixer},size=micro")
  config.model.tied_head = False
  config.opt.mixer_lr_multiplier = 3.0
  model = nnx.eval_shape(lambda: build_model(config, 0))
  rows = optimizer.describe(nnx.state(model, nnx.Param), config.opt)
  assert len({row.path for row in rows}) == len(rows)
  for row in rows:
    in_mixer = row.path.startswith("mixer.")
    norm = not in_mixer and row.path.endswith(".scale")
    table = row.path in ("embedding", "head")
    assert row.role == (
      "depth" if in_mixer
      else "norm scale" if norm
      else "embedding" if table
      else "kernel"
    )  # fmt: skip
    assert row.decayed == (row.role in ("kernel", "embedding"))
    assert row.lr_multiplier == (3.0 if in_mixer else 1.0)
  assert any(row.role == "depth" for row in rows) == (mixer != "residual")
