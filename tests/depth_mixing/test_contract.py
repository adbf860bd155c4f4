"""What every mechanism must satisfy, checked on every case of cases.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnres_jax.depth_mixing import base, registry
from tests.depth_mixing import cases, oracles

# float32 against float64 over a few sublayers of about unit size: rounding of
# 1e-7 per operation, amplified by 7 sublayers.
VALUE_TOLERANCE = 2e-5
# A central difference of the float64 oracle (step 1e-6, error about 1e-9)
# against a float32 derivative of about unit size.
GRADIENT_TOLERANCE = 2e-4
# Two float32 computations of the same formula in another order.
REORDER_TOLERANCE = 5e-6
# bfloat16 keeps 8 bits; 7 sublayers each round their input and output once.
BF16_TOLERANCE = 0.08

every_case = pytest.mark.parametrize("case", cases.CASES)
# One case per way of reading and writing, for what needs a compilation more.
each_kind = pytest.mark.parametrize("case", cases.KINDS)


def test_every_mechanism_has_a_case():
  assert {name for name, _ in cases.CASES.values()} == set(registry.MIXERS)
  assert set(oracles.ORACLES) == set(registry.MIXERS)


@every_case
def test_values_and_weights_match_the_oracle(case):
  t = cases.toy(case)
  h, weights = cases.jitted(case)(t.parameters, t.matrices, t.embedding)
  want_h, want_weights = cases.run_oracle(
    t, t.parameters, t.matrices, t.embedding
  )
  scale = np.abs(want_h).max()
  np.testing.assert_allclose(h / scale, want_h / scale, atol=VALUE_TOLERANCE)
  for l, (got, want) in enumerate(zip(weights, want_weights, strict=True)):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(
      got, want, atol=VALUE_TOLERANCE, err_msg=f"sublayer {l}"
    )


@every_case
def test_gradients_match_the_oracle(case):
  """Along random directions: parameters, sublayers and embedding at once."""
  t = cases.toy(case)
  inputs = (t.parameters, t.matrices, t.embedding)
  probe = np.asarray(jax.random.normal(jax.random.key(3), t.embedding.shape))

  @jax.jit
  @jax.grad
  def gradient(inputs):
    return jnp.sum(probe * cases.run(t, *inputs))

  def oracle_value(inputs):
    return np.sum(probe * cases.run_oracle(t, *inputs)[0])

  got = gradient(inputs)
  for part in range(3):  # a direction in one of the three inputs at a time
    if not jax.tree.leaves(inputs[part]):
      continue
    direction = _random_like(inputs[part], seed=part)

    def moved(step, part=part, direction=direction):
      shifted = _shift(inputs[part], direction, step)
      return (*inputs[:part], shifted, *inputs[part + 1 :])

    step = 1e-6
    want = (oracle_value(moved(step)) - oracle_value(moved(-step))) / (2 * step)
    products = jax.tree.map(lambda g, d: np.sum(g * d), got[part], direction)
    # How large the product would be for a direction that fits the gradient.
    size = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(got[part])))
    np.testing.assert_allclose(
      sum(jax.tree.leaves(products)) / size, want / size,
      atol=GRADIENT_TOLERANCE, err_msg=f"input {part}",
    )  # fmt: skip


def _random_like(tree, seed):
  leaves, structure = jax.tree.flatten(tree)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return jax.tree.unflatten(
    structure,
    [
      np.asarray(jax.random.normal(k, x.shape), np.float64)
      for k, x in zip(keys, leaves, strict=True)
    ],
  )


def _shift(tree, direction, step):
  """tree + step * direction in float64."""
  return jax.tree.map(
    lambda x, d: np.asarray(x, np.float64) + step * d, tree, direction
  )


@each_kind
def test_eager_equals_jit(case):
  t = cases.toy(case)
  h, _ = cases.jitted(case)(t.parameters, t.matrices, t.embedding)
  eager = cases.run(t, t.parameters, t.matrices, t.embedding)
  np.testing.assert_allclose(h, eager, atol=REORDER_TOLERANCE * 10)


@each_kind
@pytest.mark.parametrize("remat", ["sublayer", "block"])
def test_remat_changes_nothing(case, remat):
  t = cases.toy(case)

  @functools.partial(jax.jit, static_argnums=0)
  def gradient(remat, *inputs):
    def loss(inputs):
      return jnp.sum(jnp.sin(cases.run(t, *inputs, remat=remat)))

    return jax.value_and_grad(loss)(inputs)

  inputs = (t.parameters, t.matrices, t.embedding)
  want, got = gradient("none", *inputs), gradient(remat, *inputs)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    size = max(1.0, float(np.abs(b).max()))
    np.testing.assert_allclose(a / size, b / size, atol=REORDER_TOLERANCE)


@every_case
def test_source_counts_match_the_weights(case):
  t = cases.toy(case)
  mixer = nnx.merge(t.graphdef, t.parameters)
  _, weights = cases.jitted(case)(t.parameters, t.matrices, t.embedding)
  for l, w in enumerate(weights):
    sources = mixer.sources(l)
    assert len(sources) == w.shape[0], f"sublayer {l}"
    outputs = {i for source in sources for i in source}
    assert outputs <= set(range(l + 1)), "no sublayer reads a later output"
  assert str(len(mixer.sources(cases.DEPTH))) in mixer.describe()


@each_kind
def test_tokens_do_not_mix(case):
  """The mixing of a token depends on no other token, in value or gradient."""
  t = cases.toy(case)

  def last_token(embedding):
    return cases.run(t, t.parameters, t.matrices, embedding)[0, -1].sum()

  gradient = jax.jit(jax.grad(last_token))(t.embedding)
  assert np.abs(gradient[0, -1]).max() > 0
  others = gradient.at[0, -1].set(0)
  np.testing.assert_array_equal(others, jnp.zeros_like(others))


@every_case
def test_permuted_tokens_permute_the_result(case):
  t = cases.toy(case)
  order = np.array([3, 0, 4, 1, 2])
  f = cases.jitted(case)
  h, weights = f(t.parameters, t.matrices, t.embedding)
  h2, weights2 = f(t.parameters, t.matrices, t.embedding[:, order])
  np.testing.assert_allclose(h[:, order], h2, atol=REORDER_TOLERANCE)
  for w, w2 in zip(weights, weights2, strict=True):
    np.testing.assert_allclose(w[:, :, order], w2, atol=REORDER_TOLERANCE)


@each_kind
def test_no_state_leaks_between_traces(case):
  """Tracing twice, with leak checks, gives the same program and sources."""
  t = cases.toy(case)
  inputs = (t.parameters, t.matrices, t.embedding)
  with jax.checking_leaks():
    first = jax.make_jaxpr(functools.partial(cases.run, t))(*inputs)
    second = jax.make_jaxpr(functools.partial(cases.run, t))(*inputs)
  assert len(first.eqns) == len(second.eqns)
  assert [a.shape for a in first.out_avals] == [
    a.shape for a in second.out_avals
  ]


@each_kind
def test_bfloat16_stays_close(case):
  """bfloat16 sources: same dtype out, close values, float32 weights."""
  t = cases.toy(case)
  want, _ = cases.jitted(case)(t.parameters, t.matrices, t.embedding)
  h, weights = cases.jitted(case)(
    t.parameters, t.matrices, t.embedding.astype(jnp.bfloat16)
  )
  assert h.dtype == jnp.bfloat16
  assert all(w.dtype == jnp.float32 for w in weights)
  error = np.abs(np.asarray(h, np.float32) - want).mean()
  assert error < BF16_TOLERANCE * np.abs(want).mean()


@each_kind
def test_zero_outputs_are_finite(case):
  """Sublayers that return exact zeros (zero-initialised projections)."""
  t = cases.toy(case, random=False)
  zeros = jnp.zeros_like(t.matrices)

  def loss(inputs):
    return jnp.sum(cases.run(t, *inputs) ** 2)

  value, gradient = jax.jit(jax.value_and_grad(loss))(
    (t.parameters, zeros, t.embedding)
  )
  for x in (value, *jax.tree.leaves(gradient)):
    assert np.isfinite(x).all()


@every_case
def test_mixer_parameters_have_the_role(case):
  """Every parameter is a float32 DepthParam, whatever its rank."""
  t = cases.toy(case, random=False)
  mixer = nnx.merge(t.graphdef, t.parameters)
  assert nnx.state(mixer, base.DepthParam) == nnx.state(mixer)
  for x in jax.tree.leaves(t.parameters):
    assert x.dtype == jnp.float32


def test_wrong_number_of_sublayers():
  t = cases.toy("full")
  with pytest.raises(ValueError, match="got 3 sublayers, expected"):
    cases.run(t, t.parameters, t.matrices[:3], t.embedding)
