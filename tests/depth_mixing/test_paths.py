"""Who computes depth attention, the fused norm, and the pending addition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnres_jax.config import validate
from attnres_jax.depth_mixing import base, paths, registry
from attnres_jax.model.decoder import build_model
from attnres_kernels.depth_attention import chips
from configs.train import get_config
from tests.depth_mixing import cases

# Two float32 computations of the same formula, relative to the largest entry.
REORDER_TOLERANCE = 5e-6
# The same, where one of the two sums products of parts of a float32.
KERNEL_TOLERANCE = 2e-5

L = cases.DEPTH


@pytest.fixture
def calls(monkeypatch):
  """Names and arguments of the calls of the kernel package, in order."""
  seen = []

  def counted(name):
    function = getattr(paths.depth_attention, name)

    def call(*args, **kwargs):
      seen.append((name, args, kwargs))
      return function(*args, **kwargs)

    return call

  for name in ("attend", "merge"):
    monkeypatch.setattr(paths.depth_attention, name, counted(name))
  return seen


def trace_gradient(t):
  def loss(inputs):
    return jnp.sum(cases.run(t, *inputs))

  jax.eval_shape(jax.grad(loss), (t.parameters, t.matrices, t.embedding))


@pytest.mark.fast
@pytest.mark.parametrize(
  ("case", "queries"),
  [
    ("full", [4, 1]),  # group_size 4
    ("block_2", [2, 2, 1]),
    ("block_3", [3, 2]),
    ("block_raw_keys", [3, 2]),
    ("window_2", [1] * L),
    ("full_single_phase", [1] * L),
    ("block_single_phase", [1] * L),
  ],
)
def test_training_uses_the_kernel_package(calls, case, queries):
  """`open` attends once for all queries of its block, `read` merges once."""
  trace_gradient(cases.toy(case))
  attends = [args[0].shape for name, args, _ in calls if name == "attend"]
  assert attends == [(q, cases.WIDTH) for q in [*queries, 1]]  # 1: the output
  merges = [kwargs for name, _, kwargs in calls if name == "merge"]
  assert [m["norm_eps"] for m in merges] == [cases.EPS] * L + [None]


@pytest.mark.fast
def test_block_leaves_its_additions_to_the_merges(calls):
  trace_gradient(cases.toy("block_3"))
  merges = [args for name, args, _ in calls if name == "merge"]
  assert [(len(args[2]), args[3] is not None) for args in merges] == [
    (0, False), (1, False), (1, True),  # nothing yet; one output; two
    (0, False), (1, False),
    (0, False),  # the output's aggregation
  ]  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("case", ["full_input", "full_none", "block_heads"])
def test_other_options_take_the_generic_path(calls, case):
  t = cases.toy(case)
  trace_gradient(t)
  assert not calls
  description = nnx.merge(t.graphdef, t.parameters).describe()
  assert "depth attention: generic XLA path (" in description


@pytest.mark.fast
def test_describe_names_the_path():
  def describe(**options):
    return registry.build("full", 4, 16, norm_eps=1e-5, **options).describe()

  assert "kernel package, implementation default" in describe()
  assert "implementation xla" in describe(implementation="xla")
  assert "generic XLA path (heads=4)" in describe(heads=4)
  many = describe(heads=2, query="input", activation="sigmoid")
  assert "(query=input, activation=sigmoid, heads=2)" in many


@pytest.mark.fast
def test_the_implementation_is_an_option(calls):
  """From the config to every call."""
  config = get_config("mixer=block,size=micro")
  assert config.mixer.implementation is None
  config.mixer.implementation = "reference"
  validate(config)
  model = nnx.eval_shape(lambda: build_model(config, 0))
  graphdef, parameters = nnx.split(model)
  ids = jnp.zeros((1, 8), jnp.int32)
  jax.eval_shape(lambda p: nnx.merge(graphdef, p)(ids, ids, ids), parameters)
  assert {kwargs["implementation"] for _, _, kwargs in calls} == {"reference"}
  # The decoder's PreNorms are fused, with their scales.
  merges = [kwargs for name, _, kwargs in calls if name == "merge"]
  fused = [kwargs["norm_scale"] is not None for kwargs in merges]
  assert fused == [True] * 2 * config.model.layers + [False]


@pytest.mark.parametrize("case", ["full", "block_3", "block_heads"])
def test_fused_norm_equals_the_norm_behind(case):
  """Values and gradients, that of the norm's scale among them."""
  t = cases.toy(case)
  keys = jax.random.split(jax.random.key(1), L)
  scales = [1 + 0.5 * jax.random.normal(k, (cases.WIDTH,)) for k in keys]
  inputs = (t.parameters, t.matrices, t.embedding, scales)

  def gradient(wrap):
    def loss(inputs):
      parameters, matrices, embedding, scales = inputs
      mixer = nnx.merge(t.graphdef, parameters)
      sublayers = [
        (wrap(cases.ToyNorm(scale)), lambda h, m=m: jnp.tanh(h @ m))
        for scale, m in zip(scales, matrices, strict=True)
      ]
      return jnp.sum(jnp.sin(base.run(mixer, embedding, sublayers)))

    return jax.jit(jax.value_and_grad(loss))(inputs)

  fused = gradient(lambda norm: norm)
  behind = gradient(lambda norm: lambda h: norm(h))
  assert_close(fused, behind, REORDER_TOLERANCE)


@pytest.mark.parametrize("case", ["block_3", "block_heads"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pending_addition(case, dtype):
  """Between a write and the next read a Block state holds the running sum and
  what is still to be added to it; the sum is float32."""
  t = cases.toy(case)
  mixer = nnx.merge(t.graphdef, t.parameters)
  keys = jax.random.split(jax.random.key(2), 3)
  embedding, first, second = (
    jax.random.normal(k, t.embedding.shape).astype(dtype) for k in keys
  )
  state = mixer.start(embedding)
  state, (x0, x1, x2) = mixer.open(state, range(3))
  _, state = mixer.read(state, x0, cases.toy_norm)
  state = mixer.write(state, x0, first)
  assert state.recent == (first,) and state.pending is None
  _, state = mixer.read(state, x1, cases.toy_norm)
  state = mixer.write(state, x1, second)
  assert state.recent == (first,) and state.pending is second

  wide = first.astype(jnp.float32) + second.astype(jnp.float32)
  added = state.added()
  np.testing.assert_array_equal(added.recent[0], wide)
  np.testing.assert_array_equal(
    mixer.weights(state, x2), mixer.weights(added, x2)
  )
  closed = mixer.close(state, range(3))
  assert closed.recent == () and closed.pending is None
  np.testing.assert_array_equal(closed.finished[1], wide.astype(dtype))

  h, after = mixer.read(state, x2, cases.toy_norm)
  assert after.pending is None and after.recent[0].dtype == jnp.float32
  np.testing.assert_array_equal(after.recent[0], wide)
  h2, _ = mixer.read(added, x2, cases.toy_norm)
  assert h.dtype == h2.dtype == dtype
  np.testing.assert_array_equal(h, h2)


@pytest.mark.parametrize("case", ["full", "block_3"])
def test_tpu_kernels_equal_the_default(case):
  """Interpreted: the whole toy model, values and gradients."""
  name, options = cases.CASES[case]
  t = cases.toy(case)

  def gradient(implementation):
    mixer = registry.build(
      name, L, cases.WIDTH, norm_eps=cases.EPS, implementation=implementation,
      **options,
    )  # fmt: skip
    toy = dataclasses.replace(t, graphdef=nnx.graphdef(mixer))

    def loss(inputs):
      return jnp.sum(jnp.sin(cases.run(toy, *inputs)))

    inputs = t.parameters, t.matrices, t.embedding
    return jax.jit(jax.value_and_grad(loss))(inputs)

  with chips.interpreted():
    got = gradient("pallas_tpu")
  assert_close(got, gradient(None), KERNEL_TOLERANCE)


def assert_close(got, want, tolerance):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    size = max(1.0, float(np.abs(b).max()))
    np.testing.assert_allclose(a / size, b / size, atol=tolerance)
