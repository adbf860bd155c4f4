"""Attention Residuals: boundaries, identities with the baseline, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnres_jax.depth_mixing import registry
from attnres_jax.errors import UserError
from tests.depth_mixing import cases

# Zero queries average n sources where the baseline sums them; the following
# norm divides the factor out, up to eps / mean square (eps 1e-5 here, and an
# average of n sources has 1 / n^2 of the sum's mean square).
ZERO_QUERY_TOLERANCE = 2e-3
# Two schedules of the same float32 sum.
SCHEDULE_TOLERANCE = 5e-6

L = 12


def build(name, depth=L, width=cases.WIDTH, **options):
  return registry.build(name, depth, width, norm_eps=cases.EPS, **options)


@pytest.mark.fast
@pytest.mark.parametrize(
  ("size", "sublayer", "sources"),
  [
    (4, 0, [(0,)]),
    (4, 1, [(0,), (1,)]),
    (4, 3, [(0,), (1, 2, 3)]),
    (4, 4, [(0,), (1, 2, 3, 4)]),  # first of block 2: no running sum yet
    (4, 5, [(0,), (1, 2, 3, 4), (5,)]),
    (4, 12, [(0,), (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)]),
    (1, 3, [(0,), (1,), (2,), (3,)]),
    (5, 11, [(0,), (1, 2, 3, 4, 5), (6, 7, 8, 9, 10), (11,)]),
    (5, 12, [(0,), (1, 2, 3, 4, 5), (6, 7, 8, 9, 10), (11, 12)]),
    (12, 11, [(0,), tuple(range(1, 12))]),
    (12, 12, [(0,), tuple(range(1, 13))]),
    (15, 12, [(0,), tuple(range(1, 13))]),
  ],
)
def test_block_sources_are_these(size, sublayer, sources):
  assert build("block", block_size=size).sources(sublayer) == tuple(sources)


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2, 3, 5, L - 1, L, L + 3])
def test_block_source_counts(size):
  """Embedding + finished blocks + (running sum unless a block just began)."""
  mixer = build("block", block_size=size)
  counts = [len(mixer.sources(l)) for l in range(L + 1)]
  assert counts[:L] == [1 + l // size + (l % size != 0) for l in range(L)]
  assert counts[L] == (L - 1) // size + 2
  assert [len(b) for b in mixer.blocks] == [
    min(size, L - i) for i in range(0, L, size)
  ]


@pytest.mark.fast
def test_paper_source_counts():
  """Figure 8, counted: 32 sublayers, S = 4 (pre-attention, then pre-MLP)."""
  mixer = build("block", 32, block_size=4)
  counts = [len(mixer.sources(l)) for l in range(32)]
  assert counts[0::2] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9]
  assert counts[1::2] == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9]
  full = build("full", 32)
  assert [len(full.sources(l)) for l in range(32)] == list(range(1, 33))
  # The 48B model: 54 sublayers, 6 per block, 10 sources at the output.
  assert len(build("block", 54, block_size=6).sources(54)) == 10
  # K3: 186 sublayers, 24 per block: 9 sources at the output.
  assert len(build("block", 186, block_size=24).sources(186)) == 9


@pytest.mark.fast
def test_window_sources():
  mixer = build("sliding_window", window=3)
  assert mixer.sources(2) == ((0,), (1,), (2,))
  assert mixer.sources(6) == ((0,), (4,), (5,), (6,))
  assert mixer.sources(12) == ((0,), (10,), (11,), (12,))


@pytest.mark.parametrize(
  ("name", "options"),
  [("full", {})]
  + [("block", dict(block_size=s)) for s in (1, 2, 3, 5, L - 1, L, L + 3)],
)
def test_zero_queries_equal_the_baseline(name, options):
  """The mixture is then the average, and the norm ignores its factor: every
  sublayer must see exactly the residual stream."""
  keys = jax.random.split(jax.random.key(0))
  matrices = jax.random.normal(keys[0], (L, cases.WIDTH, cases.WIDTH)) / 4
  embedding = jax.random.normal(keys[1], (2, 5, cases.WIDTH))

  def final(mixer):
    graphdef, parameters = nnx.split(mixer)
    t = cases.Toy(graphdef, parameters, matrices, embedding, None, {})
    return cases.toy_norm(cases.run(t, parameters, matrices, embedding))

  np.testing.assert_allclose(
    final(build(name, **options)), final(build("residual")),
    atol=ZERO_QUERY_TOLERANCE,
  )  # fmt: skip


@pytest.mark.parametrize(
  ("case", "other"),
  [
    ("block_1", "full"),
    ("block_all", "block_beyond"),
    ("full", "full_single_phase"),
    ("full_group_1", "full_group_100"),
    ("block_3", "block_single_phase"),
    ("full_reference", "full_single_phase"),
    ("block_reference", "block_single_phase"),
    ("block_xla", "block_3"),
    ("window_beyond", "full"),
  ],
)
def test_equal_mechanisms(case, other):
  """S = 1 is Full, S >= L is one block, both schedules are one function."""
  t, u = cases.toy(case), cases.toy(other)
  h, _ = cases.jitted(case)(t.parameters, t.matrices, t.embedding)
  h2, _ = cases.jitted(other)(u.parameters, u.matrices, u.embedding)
  np.testing.assert_allclose(h, h2, atol=SCHEDULE_TOLERANCE)


@pytest.mark.parametrize("case", ["full", "block_3", "full_heads"])
def test_softmax_weights_sum_to_one(case):
  t = cases.toy(case)
  _, weights = cases.jitted(case)(t.parameters, t.matrices, t.embedding)
  for w in weights:
    np.testing.assert_allclose(w.sum(0), 1.0, atol=1e-6)
    assert w.min() >= 0


@pytest.mark.parametrize("case", ["full", "block_3"])
def test_weights_differ_by_token(case):
  t = cases.toy(case)
  _, weights = cases.jitted(case)(t.parameters, t.matrices, t.embedding)
  spread = np.asarray(weights[-1]).std(axis=(1, 2))
  assert spread.min() > 1e-3


@pytest.mark.parametrize("case", ["full", "block_3", "window_2"])
def test_saturated_weights_match_the_oracle(case):
  """Queries times 1e4: logits far beyond float32's exp, one weight is 1."""
  t = cases.toy(case)
  parameters = jax.tree.map(lambda x: x, t.parameters)
  parameters["query"]["query"][...] *= 1e4
  h, weights = cases.jitted(case)(parameters, t.matrices, t.embedding)
  assert np.isfinite(h).all()
  assert max(float(w.max()) for w in weights) == 1.0
  # The first read alone: further on, a near tie decides differently in
  # float32 and float64.
  _, want = cases.run_oracle(t, parameters, t.matrices, t.embedding)
  np.testing.assert_allclose(weights[1], want[1], atol=1e-2)


@pytest.mark.parametrize("case", ["full", "block_3"])
def test_output_query_picks_its_source(case):
  """A large output query along the embedding's key returns the embedding."""
  t = cases.toy(case, random=False)
  embedding = jnp.broadcast_to(t.embedding[:1, :1], t.embedding.shape)
  parameters = jax.tree.map(lambda x: x, t.parameters)
  query = parameters["query"]["query"]
  query[...] = query[...].at[-1].set(1e3 * embedding[0, 0])
  h, _ = cases.jitted(case)(parameters, t.matrices, embedding)
  np.testing.assert_allclose(h, embedding, atol=1e-5)


@pytest.mark.fast
def test_queries_start_at_zero():
  for name in ("full", "block", "sliding_window"):
    for kind in ("static", "input"):
      mixer = build(name, query=kind)
      assert not np.any(mixer.query.query[...])
      assert np.all(mixer.query.keys.scale[...] == 1)


def test_first_query_is_never_used():
  """One source, one weight of 1: its query has no gradient, the others do."""
  rounding = 1e-5  # the two halves of the softmax's derivative cancel in float
  t = cases.toy("full")

  def loss(parameters):
    return jnp.sum(cases.run(t, parameters, t.matrices, t.embedding) ** 2)

  gradient = jax.jit(jax.grad(loss))(t.parameters)["query"]["query"][...]
  np.testing.assert_allclose(gradient[0], 0, atol=rounding)
  assert (np.abs(gradient[1:]).max(axis=-1) > 100 * rounding).all()


@pytest.mark.fast
@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("block", dict(block_size=0), "got block_size 0: expected .* >= 1"),
    ("block", dict(block_size=-2), "got block_size -2"),
    ("block", dict(num_blocks=0), "got num_blocks 0: expected 1 to 12"),
    ("block", dict(num_blocks=13), "got num_blocks 13: expected 1 to 12"),
    ("block", dict(num_blocks=2, block_size=2), "expected one"),
    ("sliding_window", dict(window=0), "got window 0"),
    ("sliding_window", dict(window=-1), "got window -1"),
    ("full", dict(heads=3), "got 3 depth heads for width 16"),
    ("full", dict(heads=0), "got 0 depth heads"),
    ("full", dict(activation="softmx"), "Did you mean 'softmax'"),
    ("full", dict(query="statik"), "Did you mean 'static'"),
    ("full", dict(schedule="two"), "unknown schedule 'two'"),
    ("full", dict(implementation="pallas"), "Did you mean 'pallas_tpu'"),
    (
      "full",
      dict(implementation="xla", heads=4),
      "got implementation 'xla' with heads=4: expected query=static",
    ),
    (
      "block",
      dict(implementation="pallas_tpu", query="none", activation="sigmoid"),
      "with query=none, activation=sigmoid: expected",
    ),
    (
      "sliding_window",
      dict(implementation="reference", query="input"),
      "with query=input: expected",
    ),
    ("full", dict(block_size=2), "unknown option .* 'block_size'"),
    ("blok", {}, "Did you mean 'block'"),
    ("denseformer", dict(period=0), "got period 0"),
    ("denseformer", dict(dilation=-1), "got dilation -1"),
    ("mhc", dict(streams=0), "got streams 0"),
    ("mhc_lite", dict(streams=7), "at most 6"),
  ],
)
def test_bad_options(name, options, message):
  with pytest.raises(UserError, match=message) as error:
    build(name, **options)
  assert "\n" not in str(error.value)
  assert "--config" in str(error.value)
