"""Every implementation, here on a CPU, against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres_kernels.depth_attention import api, reference, xla
from attnres_kernels.depth_attention.types import MergeOptions
from tests.kernels import cases
from tests.kernels.cases import attend_case, check, merge_case, normal

# No deadline: a new shape is compiled. Derandomised: the same shapes each run,
# so that their programs come from the compilation cache.
few = settings(max_examples=6, deadline=None, derandomize=True, database=None)
dtypes = st.sampled_from(["float32", "bfloat16"])
leads = st.sampled_from([(), (1,), (2,), (2, 1)])
eps_values = st.sampled_from([cases.EPS, None])
implementations = pytest.mark.parametrize(
  "implementation", cases.IMPLEMENTATIONS_UNDER_TEST
)


# R, Q, T, D: every value the models use, and sizes that fit no tile.
@pytest.mark.parametrize(
  ("sizes", "dtype"),
  [
    ((1, 1, 1, 64), "float32"),
    ((2, 6, 7, 96), "bfloat16"),
    ((2, 12, 63, 120), "float32"),
    ((10, 1, 65, 1000), "bfloat16"),
    ((9, 6, 100, 1168), "float32"),
    ((2, 1, 1000, 1536), "bfloat16"),
    ((10, 6, 65, 2304), "float32"),
    ((2, 24, 7, 64), "bfloat16"),
    ((33, 1, 100, 96), "float32"),
    ((65, 1, 7, 120), "float32"),
  ],
  ids=str,
)
@implementations
def test_attend(implementation, sizes, dtype):
  check(implementation, attend_case(*sizes, dtype))


@implementations
@few
@given(
  st.integers(1, 5), st.integers(1, 4), st.integers(1, 70), st.integers(2, 140),
  dtypes, leads, eps_values, st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_attend_at_random(
  implementation, r, q, t, d, dtype, lead, eps, scaled, seed
):
  case = attend_case(
    r, q, t, d, dtype, lead=lead, eps=eps, scaled=scaled, seed=seed
  )
  check(implementation, case)


@pytest.mark.parametrize(
  ("sizes", "options"),
  [
    ((0, 7, 64), dict()),
    ((1, 1, 96), dict(update=False)),
    ((1, 63, 120), dict()),
    ((1, 100, 1168), dict(attended=False)),
    ((1, 65, 1000), dict(dtype="bfloat16", recent_dtype="float32")),
    ((1, 7, 2304), dict(dtype="bfloat16", total_dtype="bfloat16")),
    ((1, 1000, 64), dict(return_merged=True)),
    ((2, 65, 1536), dict(norm_eps=None, eps=None)),
    ((3, 9, 96), dict(scaled=False, lead=(2,))),
    ((9, 7, 64), dict(attended=False, update=False, norm_eps=None)),
  ],
  ids=str,
)
@implementations
def test_merge(implementation, sizes, options):
  check(implementation, merge_case(*sizes, **options))


@implementations
@few
@given(
  st.integers(0, 4), st.integers(1, 70), st.integers(2, 140), dtypes, leads,
  st.booleans(), st.booleans(), dtypes, eps_values, eps_values, st.booleans(),
  dtypes, st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_merge_at_random(
  implementation, k, t, d, dtype, lead, attended, update, recent_dtype, eps,
  norm_eps, scaled, total_dtype, return_merged, seed,
):  # fmt: skip
  case = merge_case(
    k, t, d, dtype, lead=lead, attended=attended or k == 0, update=update,
    recent_dtype=recent_dtype, eps=eps, norm_eps=norm_eps, scaled=scaled,
    total_dtype=total_dtype, return_merged=return_merged, seed=seed,
  )  # fmt: skip
  check(implementation, case)


# name -> (options, tolerance; None: the usual one).
HARD = {
  "sizes_apart": (dict(sizes=[1e-2, 1.0, 1e2]), None),
  # One weight is 1, the others are 0 nearly everywhere; where they are not,
  # logits of 1e4 have passed their rounding of 1e-3 on to them.
  "saturated": (dict(query_size=1e4), 1e-3),
  # 1 / RMS of a zero source is eps^-0.5 = 316, and so much larger is the
  # rounding of its logit's derivative in the source's.
  "some_zero": (dict(sizes=[0.0, 1.0, 0.0]), 2e-4),
  "all_zero": (dict(sizes=[0.0, 0.0, 0.0]), 2e-4),
  "zero_queries": (dict(query_size=0.0), None),
  # Derivatives of logits sum to 0, and what is left by rounding is multiplied
  # by the shared part in the derivative of the query.
  "common_part": (dict(common=100.0, query_size=8.0), None),
  "one_huge": (dict(sizes=[1.0, 1e4, 1.0], query_size=3.0), None),
}


@pytest.mark.parametrize("hard", HARD)
@implementations
def test_hard_inputs_of_attend(implementation, hard):
  options, tolerance = HARD[hard]
  check(implementation, attend_case(3, 2, 65, 96, **options), tolerance)


@pytest.mark.parametrize("hard", HARD)
@implementations
def test_hard_inputs_of_merge(implementation, hard):
  options, tolerance = HARD[hard]
  check(implementation, merge_case(3, 65, 96, **options), tolerance)


@implementations
def test_zero_query_averages(implementation):
  """The paper starts every query at zero: equal weights."""
  case = attend_case(4, 1, 7, 64, query_size=0.0)
  (got,), _ = cases.run(implementation, case)
  mean = sum(np.asarray(v, np.float64) for v in case.arrays["sources"]) / 4
  cases.compare("mean", got.out, mean)


@pytest.mark.parametrize("query_size", [1.0, 30.0])
@implementations
def test_weights_sum_to_one(implementation, query_size):
  """A channel that is 1 in every source is 1 in their average."""
  case = attend_case(9, 2, 65, 96, query_size=query_size)
  sources = [v.at[..., -1].set(1.0) for v in case.arrays["sources"]]
  arrays = dict(case.arrays, sources=tuple(sources[:7]))
  with cases.context(implementation):
    attended = api.attend(
      **arrays, **case.static, implementation=implementation
    )
    merged = api.merge(
      arrays["queries"][1], attended[1], sources[7:], eps=cases.EPS,
      norm_eps=None, implementation=implementation,
    )  # fmt: skip
  for h in (attended[0].out, attended[1].out, merged.normed):
    np.testing.assert_allclose(h[..., -1], 1.0, rtol=0, atol=cases.WEIGHT_SUM)


def two_phases(c, sources, norm_scale, cut, implementation):
  """The mixture of `sources`, the last of which is a sum of two arrays."""
  *sources, before, update = sources
  finished = sources[:cut]
  kwargs = dict(eps=cases.EPS, implementation=implementation)
  attended = None
  if finished:
    (attended,) = api.attend(c[None], finished, **kwargs)
  return api.merge(
    c, attended, [*sources[cut:], before], update, norm_scale=norm_scale,
    norm_eps=cases.EPS, **kwargs,
  ).normed  # fmt: skip


@pytest.mark.parametrize("cut", [0, 2, 4])
@implementations
def test_two_phases_equal_one(implementation, cut):
  """Wherever the sources are cut, in value and in every gradient."""
  one = merge_case(5, 33, 96, attended=False, scaled=False, query_size=2.0)
  c, norm_scale = one.arrays["query"], jnp.linspace(0.5, 2, 96)
  sources = (*one.arrays["recent"], one.arrays["update"])

  def one_softmax(inputs):
    c, sources, norm_scale = inputs
    *recent, update = sources
    return api.merge(
      c, None, recent, update, norm_scale=norm_scale, eps=cases.EPS,
      norm_eps=cases.EPS, implementation="reference",
    ).normed  # fmt: skip

  def cut_there(inputs):
    return two_phases(*inputs, cut, implementation)

  inputs = c, sources, norm_scale
  probe = normal(np.random.default_rng(5), sources[0].shape)
  with cases.context(implementation):
    got = cases.with_gradients(cut_there)(inputs, probe)
  want = cases.with_gradients(one_softmax)(inputs, probe)
  cases.compare("two phases", got, want)


SMALL = {
  "attend": lambda: attend_case(3, 2, 65, 96),
  "merge": lambda: merge_case(2, 65, 96),
}


@pytest.mark.parametrize("op", SMALL)
@implementations
def test_same_bits_every_run(implementation, op):
  first, second = (cases.run(implementation, SMALL[op]()) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("op", SMALL)
@implementations
def test_tokens_do_not_meet(implementation, op):
  """Permuted tokens give permuted results (matmuls may group rows)."""
  case = SMALL[op]()
  order = np.random.default_rng(0).permutation(65)

  def permuted(x):
    axis = x.shape.index(65) if 65 in x.shape else None
    return x if axis is None else jnp.take(x, order, axis=axis)

  moved = cases.Case(
    op, jax.tree.map(permuted, case.arrays), case.static, case.seed
  )
  want = jax.tree.map(permuted, cases.run(implementation, case)[0])
  cases.compare("permuted", cases.run(implementation, moved)[0], want)


@pytest.mark.parametrize("op", SMALL)
def test_reference_in_float32(op):
  """The oracle's own path through the api."""
  check("reference", SMALL[op]())


def called(module, case, dtype="float32"):
  """(function of arrays, its arguments) without the api, which rounds."""
  if case.op == "attend":
    inputs = [case.arrays[k] for k in ("queries", "sources")]
    return lambda *a: module.attend(*a, cases.EPS), inputs
  keys = ("query", "attended", "recent", "update", "norm_scale")
  options = MergeOptions(cases.EPS, cases.EPS, *[jnp.dtype(dtype)] * 2, False)
  inputs = [case.arrays[k] for k in keys]
  return lambda *a: module.merge(*a, options), inputs


@pytest.mark.parametrize("op", SMALL)
def test_xla_in_float64(op):
  """The written-out derivative to 11 digits: no tolerance hides a term."""
  with jax.enable_x64(True):

    def both(module):
      call, inputs = called(module, SMALL[op](), "float64")
      inputs = jax.tree.map(lambda x: x.astype("float64"), inputs)
      probe = jax.tree.map(jnp.sin, call(*inputs))
      return cases.with_gradients(lambda a: call(*a), fast=True)(inputs, probe)

    cases.compare("float64", both(xla), both(reference), cases.FLOAT64)


# The results of phase 1, which the merges keep as well; the running sum, which
# the next merge keeps.
@pytest.mark.parametrize(("op", "kept"), [("attend", 0), ("merge", 1)])
def test_xla_keeps_no_keys_for_the_backward_pass(op, kept):
  """Arrays of width D that are kept beside the arguments."""
  call, inputs = called(xla, SMALL[op]())
  _, pull_back = jax.vjp(call, *inputs)
  known = {id(x) for x in jax.tree.leaves(inputs)}
  shapes = [x.shape for x in jax.tree.leaves(pull_back) if id(x) not in known]
  assert sum(shape[-1:] == (96,) for shape in shapes) == kept, shapes


SHARDED = """
import re
import functools
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from attnres_kernels.depth_attention import api
from tests.kernels import cases

mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,))
copies, tokens = P(), P(None, "seq")
arrays = cases.attend_case(4, 2, 16, 32, lead=(2,)).arrays
inputs = arrays["queries"], arrays["sources"]


def block(queries, sources, implementation):
  kwargs = dict(eps=cases.EPS, implementation=implementation)
  _, attended = api.attend(queries, sources[:2], **kwargs)
  merged = api.merge(
    queries[1], attended, sources[2:3], sources[3], norm_eps=1e-5, **kwargs
  )
  return merged.normed, merged.total


def gradient(f):
  loss = lambda *x: sum(jnp.sin(y).sum() for y in f(*x))
  return jax.grad(loss, argnums=(0, 1))


for implementation in cases.IMPLEMENTATIONS_UNDER_TEST:
  with cases.context(implementation):
    f = functools.partial(block, implementation=implementation)
    want = f(*inputs), gradient(f)(*inputs)
    mapped = jax.shard_map(
      f, mesh=mesh, in_specs=(copies, tokens), out_specs=tokens,
      check_vma=False,
    )
    placed = jax.device_put(inputs, (
      NamedSharding(mesh, copies), NamedSharding(mesh, tokens)
    ))
    calls = dict(mapped=mapped)
    if implementation == "xla":
      calls["automatic"] = f  # kernels need shard_map
    for name, call in calls.items():
      forward = jax.jit(call).lower(*placed).compile()
      assert not re.findall("all-|collective-", forward.as_text()), name
      backward = jax.jit(gradient(call)).lower(*placed).compile()
      text = backward.as_text()
      assert not re.findall("all-gather|all-to-all|collective-", text), name
      got = forward(*placed), backward(*placed)
      cases.compare(f"{implementation} {name}", got, want)
print("checked")
"""


def test_sharded_tokens_equal_unsharded_without_communication(run_python):
  """Only the queries' gradients are summed over devices."""
  assert "checked" in run_python(SHARDED, devices=4)
