"""The dense decoder against its equations, and what must hold for any mixer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnres_jax.depth_mixing import registry
from attnres_jax.depth_mixing.base import DepthParam
from attnres_jax.model.attention import Attention, rope
from attnres_jax.model.decoder import build_model
from attnres_jax.model.mlp import SwiGLU
from attnres_jax.model.norms import RMSNorm
from attnres_jax.model.shards import Shards
from configs.train import get_config

# float32 against float64 for one sublayer of about unit size.
SUBLAYER_TOLERANCE = 2e-5
# Two float32 orders of one computation, over a whole small model.
MODEL_TOLERANCE = 2e-5
# All-zero queries average where the baseline sums; what is left after the norm
# is eps (1e-5) over the mean square of an average of outputs that start from an
# embedding of standard deviation 0.02.
ZERO_QUERY_TOLERANCE = 2e-2

B, T = 2, 12


def micro(mixer="residual", **model):
  c = get_config(f"mixer={mixer},size=micro")
  c.data.vocab_size = 50
  for key, value in model.items():
    c.model[key] = value
  return c


def batch(seed=0):
  tokens = jax.random.randint(jax.random.key(seed), (B, T), 0, 50)
  positions = jnp.tile(jnp.arange(T), (B, 1))
  return tokens, positions, jnp.ones((B, T), jnp.int32)


@functools.cache
def logits_of(mixer="residual", **model):
  graphdef, parameters = nnx.split(build_model(micro(mixer, **model), seed=0))
  f = jax.jit(lambda p, *inputs: nnx.merge(graphdef, p)(*inputs))
  return f, parameters


def numpy_rms(x, eps=1e-5):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def numpy_rope(x, positions, theta):
  half = x.shape[-1] // 2
  out = np.empty_like(x)
  for i in range(half):
    angle = positions[:, :, None] * theta ** (-i / half)
    a, b = x[..., i], x[..., i + half]
    out[..., i] = a * np.cos(angle) - b * np.sin(angle)
    out[..., i + half] = a * np.sin(angle) + b * np.cos(angle)
  return out


@pytest.mark.parametrize(
  ("rope_theta", "qk_norm"), [(10_000.0, True), (0.0, False)]
)
def test_attention_is_its_equation(rope_theta, qk_norm):
  """Token by token and head by head, with packed segments, in float64."""
  d, n, k, h = 16, 4, 2, 6
  module = Attention(
    d, n, k, h, rope_theta=rope_theta, qk_norm=qk_norm, norm_eps=1e-5,
    dtype=jnp.float32, shards=Shards(), rngs=nnx.Rngs(params=0),
  )  # fmt: skip
  x = jax.random.normal(jax.random.key(1), (B, T, d))
  segments = jnp.array([[1] * 5 + [2] * 7, [1] * 12])
  positions = jnp.array([[*range(5), *range(7)], [*range(12)]])
  got = module(x, positions, segments, segments)

  q, key, v, out = (
    np.asarray(w[...], np.float64)
    for w in (module.q, module.k, module.v, module.out)
  )
  x = np.asarray(x, np.float64)
  q = np.einsum("btd,dnh->btnh", x, q)
  key = np.einsum("btd,dkh->btkh", x, key)
  v = np.einsum("btd,dkh->btkh", x, v)
  if qk_norm:
    q, key = numpy_rms(q), numpy_rms(key)
  if rope_theta:
    q = numpy_rope(q, np.asarray(positions), rope_theta)
    key = numpy_rope(key, np.asarray(positions), rope_theta)
  want = np.zeros((B, T, d))
  for b in range(B):
    for t in range(T):
      seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
      for head in range(n):
        group = head // (n // k)
        scores = key[b, seen, group] @ q[b, t, head] / np.sqrt(h)
        weights = np.exp(scores - scores.max())
        mixed = (weights / weights.sum()) @ v[b, seen, group]
        want[b, t] += mixed @ out[head]
  np.testing.assert_allclose(got, want, atol=SUBLAYER_TOLERANCE)


@pytest.mark.fast
def test_rope_depends_on_distance_only():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
  at = lambda x, p: np.asarray(rope(x, jnp.array([[p]]), 100.0))  # noqa: E731
  near, far = at(q, 5) * at(k, 3), at(q, 1005) * at(k, 1003)
  np.testing.assert_allclose(near.sum(), far.sum(), atol=1e-3)


@pytest.mark.fast
def test_swiglu_and_norm_are_their_equations():
  module = SwiGLU(
    8, 12, dtype=jnp.float32, shards=Shards(), rngs=nnx.Rngs(params=0)
  )
  x = jax.random.normal(jax.random.key(1), (2, 3, 8))
  wide = np.asarray(x, np.float64)
  gate, up, out = (
    np.asarray(w[...], np.float64) for w in (module.gate, module.up, module.out)
  )
  z = wide @ gate
  want = (z / (1 + np.exp(-z)) * (wide @ up)) @ out
  np.testing.assert_allclose(module(x), want, atol=SUBLAYER_TOLERANCE)
  norm = RMSNorm(8, 1e-5)
  norm.scale[...] = jnp.arange(8.0)
  np.testing.assert_allclose(
    norm(x), numpy_rms(wide) * np.arange(8), atol=SUBLAYER_TOLERANCE
  )


@pytest.mark.parametrize("mixer", registry.MIXERS)
def test_no_token_sees_a_later_one(mixer):
  """By gradient: the logits of token t do not move with later embeddings."""
  graphdef, parameters = nnx.split(build_model(micro(mixer), seed=0))
  inputs = batch()
  leaves, tree = jax.tree.flatten(parameters)
  (embedding,) = (i for i, x in enumerate(leaves) if x.shape[0] == 50)

  @jax.jit
  def sensitivity(rows):
    """|d logits[t] / d embedding row of token s|, one row per position."""

    def logit(rows, t):
      leaves[embedding] = rows
      model = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
      distinct = jnp.arange(T)[None]
      return model(distinct, inputs[1][:1], inputs[2][:1])[0, t, T:].sum()

    return jax.vmap(lambda t: jax.grad(logit)(rows, t))(jnp.arange(T))

  rows = 0.5 * jax.random.normal(jax.random.key(2), leaves[embedding].shape)
  gradient = np.abs(sensitivity(rows)[:, :T]).max(-1)  # [t, s]
  np.testing.assert_array_equal(np.triu(gradient, 1), 0)
  assert (gradient[np.tril_indices(T)] > 0).all()


def test_packed_documents_do_not_see_each_other():
  f, parameters = logits_of("full")
  tokens, _, _ = batch()
  segments = jnp.array([[1] * 5 + [2] * 7] * B)
  positions = jnp.array([[*range(5), *range(7)]] * B)
  packed = f(parameters, tokens, positions, segments)
  other = tokens.at[:, :5].add(1) % 50
  changed = f(parameters, other, positions, segments)
  np.testing.assert_array_equal(packed[:, 5:], changed[:, 5:])
  assert np.abs(packed[:, :5] - changed[:, :5]).max() > 0


@pytest.mark.parametrize("mixer", ["full", "block"])
def test_zero_queries_equal_the_baseline(mixer):
  """A fresh model with attention over depth is the residual model."""
  f, parameters = logits_of(mixer, init_std=1.0)
  g, baseline = logits_of("residual", init_std=1.0)
  got, want = f(parameters, *batch()), g(baseline, *batch())
  size = np.abs(want).max()
  np.testing.assert_allclose(got / size, want / size, atol=ZERO_QUERY_TOLERANCE)


@pytest.mark.fast
def test_only_the_mixer_differs_between_configs():
  models = {m: build_model(micro(m), seed=3) for m in registry.MIXERS}
  want = nnx.to_pure_dict(nnx.state(models["residual"]))
  for model in models.values():
    rest = nnx.to_pure_dict(nnx.state(model))
    rest.pop("mixer", None)
    jax.tree.map(np.testing.assert_array_equal, rest, want)


@pytest.mark.parametrize("mixer", ["full", "mhc"])
@pytest.mark.parametrize("remat", ["sublayer", "block"])
def test_remat_changes_nothing(mixer, remat):
  def gradient(remat):
    model = build_model(micro(mixer, remat=remat), seed=0)
    graphdef, parameters = nnx.split(model)

    @jax.jit
    def f(p):
      return jnp.mean(nnx.merge(graphdef, p)(*batch()) ** 2)

    return jax.grad(f)(parameters)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=MODEL_TOLERANCE),
    gradient("none"), gradient(remat),
  )  # fmt: skip


def test_untied_head_and_bfloat16():
  c = micro("block", tied_head=False, dtype="bfloat16")
  model = build_model(c, seed=0)
  logits = model(*batch())
  assert logits.dtype == jnp.float32 and np.isfinite(logits).all()
  assert model.head is not None
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(nnx.state(model)))
  f, parameters = logits_of("block", tied_head=False)
  want = f(parameters, *batch())
  assert np.abs(logits - want).mean() < 0.05 * np.abs(want).mean() + 1e-3


def test_depth_weights_can_be_observed():
  """One array per sublayer and one for the output, by the same interface."""
  model = build_model(micro("block"), seed=0)

  def weights():
    seen = {}
    model(*batch(), observe=seen.__setitem__)
    return seen

  seen = jax.eval_shape(weights)
  sublayers = 2 * micro().model.layers
  assert sorted(seen) == list(range(sublayers + 1))
  for l, w in seen.items():
    assert w.shape == (len(model.mixer.sources(l)), B, T, 1)


@pytest.mark.fast
def test_mixer_owns_its_parameters():
  model = build_model(micro("full"), seed=0)
  depth = nnx.to_pure_dict(nnx.state(model, DepthParam))
  assert list(depth) == ["mixer"]
