"""Phase 2 on TPU: the kernels against float64, and what they cost."""

import functools
import itertools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attnres_kernels.depth_attention import chips, pallas_tpu_merge_plan
from attnres_kernels.depth_attention import pallas_tpu_merge as merge_kernels
from attnres_kernels.depth_attention.pallas_tpu_merge_plan import (
  Case,
  buffers,
  merge_tile,
)
from attnres_kernels.depth_attention.types import (
  Attended,
  Merged,
  MergeOptions,
)

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# Errors are relative to the largest element of an array. Float32: sums over up
# to 1000 elements or 100 tokens, each rounded to 6e-8; 6e-7 was the most seen.
FLOAT32_TOLERANCE = 3e-6
# One rounding to 8 bits of mantissa is 2^-9 (2e-3); a bfloat16 total is rounded
# once more before the backward reads it.
BFLOAT16_TOLERANCE = 6e-3


class Problem(NamedTuple):
  """One call: what there is, which options, sizes and dtypes."""

  attended: bool = True
  recent: int = 1
  update: bool = True
  norm: str = "scaled"  # "none", "plain" or "scaled"
  key_norm: bool = True
  return_merged: bool = False
  shape: tuple[int, ...] = (65, 130)
  dtype: jnp.dtype = F32
  total_dtype: jnp.dtype = F32

  @property
  def options(self):
    return MergeOptions(
      key_eps=1e-6 if self.key_norm else None,
      norm_eps=None if self.norm == "none" else 1e-5,
      dtype=self.dtype,
      total_dtype=self.total_dtype,
      return_merged=self.return_merged,
    )

  @property
  def dtypes(self):
    return Merged(self.dtype, self.total_dtype, self.dtype)

  @property
  def tolerance(self):
    exact = {self.dtype, self.total_dtype} == {F32}
    return FLOAT32_TOLERANCE if exact else BFLOAT16_TOLERANCE

  def arguments(self, query_size=1.0):
    """Random arguments of `merge` but for the options."""
    rng = np.random.default_rng(list(map(int, self[:3])) + list(self.shape))
    width = self.shape[-1]

    def normal(shape, dtype=F32, size=1.0):
      return jnp.asarray(size * rng.normal(size=shape), dtype)

    attended = None
    if self.attended:
      attended = Attended(
        normal(self.shape, self.dtype),
        normal(self.shape[:-1]),
        1 + jnp.abs(normal(self.shape[:-1])),
      )
    dtypes = [self.dtype] * (self.recent - 1) + [self.total_dtype]
    return (
      normal(width, size=query_size * 2 / width**0.5),
      attended,
      tuple(normal(self.shape, d) for d in dtypes[: self.recent]),
      normal(self.shape, self.dtype) if self.update else None,
      1 + normal(width, size=0.2) if self.norm == "scaled" else None,
    )


def oracle(options, query, attended, recent, update, norm_scale):
  """The equations in the dtype of the arguments; max carries no gradient."""
  sources, total = list(recent), None
  if update is not None:
    total = sources[-1] = sources[-1] + update
  logits = []
  for v in sources:
    logit = jnp.sum(query * v, -1)
    if options.key_eps is not None:
      logit /= jnp.sqrt(jnp.mean(v * v, -1) + options.key_eps)
    logits.append(logit)
  if attended is not None:
    highest = jax.lax.stop_gradient(attended.max)
    logits.append(highest + jnp.log(attended.sum))
    sources.append(attended.out)
  weights = jax.nn.softmax(jnp.stack(logits), axis=0)
  merged = jnp.sum(weights[..., None] * jnp.stack(sources), axis=0)
  normed = merged
  if options.norm_eps is not None:
    square = jnp.mean(merged**2, -1, keepdims=True)
    normed = merged / jnp.sqrt(square + options.norm_eps)
    if norm_scale is not None:
      normed = normed * norm_scale
  return Merged(normed, total, merged if options.return_merged else None)


# Most of the time of these tests is compilation.
jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def with_gradients(call, dtypes):
  """Arguments -> (results, gradients) of fixed cotangents.

  `dtypes` of the results: cotangents are rounded to them.
  """

  def both(*arguments):
    results, pull = jax.vjp(call, *arguments)
    rng = np.random.default_rng(1)
    cotangents = Merged(
      *(
        x
        if x is None
        else jnp.asarray(rng.normal(size=x.shape), d).astype(x.dtype)
        for x, d in zip(results, dtypes, strict=True)
      )
    )
    return results, pull(cotangents)

  return both


def run_kernels(problem, arguments, mode=True):
  call = functools.partial(merge_kernels.merge, options=problem.options)
  with chips.interpreted(mode):
    both = jit(with_gradients(call, problem.dtypes))
    return jax.block_until_ready(both(*arguments))


def run_oracle(problem, arguments):
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arguments)
    call = functools.partial(oracle, problem.options)
    return jit(with_gradients(call, problem.dtypes))(*wide)


def compare(problem, got, expected):
  """Same structure, dtypes of the arguments, all errors below tolerance."""
  paths = jax.tree_util.tree_leaves_with_path(expected)
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for x, (path, y) in zip(jax.tree.leaves(got), paths, strict=True):
    x, y = np.asarray(x, np.float64), np.asarray(y)
    error = np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-3)
    name = jax.tree_util.keystr(path)
    assert error <= problem.tolerance, f"{name}: {error:.1e}"


def check(problem, mode=True, query_size=1.0):
  arguments = problem.arguments(query_size)
  results, gradients = run_kernels(problem, arguments, mode)
  assert results.normed.dtype == problem.dtype
  if problem.update:
    assert results.total.dtype == problem.total_dtype
  assert jax.tree.map(jax.typeof, gradients) == jax.tree.map(
    jax.typeof, arguments
  )
  compare(problem, (results, gradients), run_oracle(problem, arguments))
  return results, gradients


# Chosen so that the sample covers every pair of values.
SAMPLE_SEED, SAMPLE_SIZE = 3004, 24


def _problems():
  """A sample of all combinations; every pair of values occurs in it."""
  combinations = [
    x
    for x in itertools.product(
      (True, False),
      range(4),
      (True, False),
      ("none", "plain", "scaled"),
      (True, False),
      (True, False),
    )
    if (x[0] or x[1]) and (x[1] or not x[2])
  ]
  shapes = [(1, 120), (7, 64), (63, 96), (65, 130), (2, 50, 64), (100, 130)]
  # Three whole tiles: one core of two has a step without a tile.
  shapes += [(96, 64)]
  dtypes = [(F32, F32), (BF16, F32), (BF16, BF16), (F32, BF16)]
  chosen = random.Random(SAMPLE_SEED).sample(combinations, SAMPLE_SIZE)
  for i, x in enumerate(chosen):
    yield Problem(*x, shapes[i % len(shapes)], *dtypes[i % len(dtypes)])


def _name(problem):
  return "-".join(str(x).replace(" ", "") for x in problem)


@pytest.fixture
def small_tiles(monkeypatch):
  """Two cores, tiles of 32 tokens, groups of 16: few tokens need several."""
  megacore = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5P, 2)
  monkeypatch.setattr(chips, "info", lambda: megacore)
  monkeypatch.setattr(pallas_tpu_merge_plan, "MAX_GROUP", 16)
  monkeypatch.setattr(chips, "tuned_tile", lambda key: 32)


@pytest.mark.parametrize("problem", list(_problems()), ids=_name)
def test_values_and_gradients(problem, small_tiles):
  check(problem)


@pytest.mark.parametrize(
  "problem",
  [
    Problem(shape=(65, 130)),
    Problem(shape=(3, 1000), dtype=BF16),
    # More than 128 tokens in a tile: its numbers per token fill two vectors.
    Problem(shape=(2, 129, 96), recent=2, return_merged=True),
  ],
  ids=_name,
)
def test_tiles_as_chosen(problem):
  check(problem)


@pytest.mark.parametrize(
  "problem",
  [
    # Three tiles for two cores, the last of 1 token; 2 lanes past a vector.
    Problem(shape=(65, 130), return_merged=True),
    Problem(shape=(100, 120), recent=2, dtype=BF16),
    Problem(shape=(7, 64), recent=0, update=False),
  ],
  ids=_name,
)
def test_what_lies_past_the_arrays_does_not_matter(problem, small_tiles, capfd):
  """Padding is NaN; two simulated cores do not race."""
  mode = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory="nan",
    num_cores_or_threads=2,
    random_seed=0,
  )
  check(problem, mode)
  assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("query_size", [0.0, 1e3])
def test_extreme_weights(query_size):
  """Equal and saturated weights, with finite gradients."""
  check(Problem(shape=(7, 64), recent=2), query_size=query_size)


@pytest.mark.fast
@pytest.mark.parametrize("attended", [True, False])
def test_zero_sources_and_an_empty_side_are_finite(attended):
  problem = Problem(attended=attended, shape=(7, 64), return_merged=True)
  zeros = jax.tree.map(jnp.zeros_like, problem.arguments())
  if attended:
    ones = jnp.ones_like(zeros[1].sum)
    zeros = zeros[0], zeros[1]._replace(sum=ones), *zeros[2:]
  for x in jax.tree.leaves(run_kernels(problem, zeros)):
    assert np.isfinite(np.asarray(x, np.float32)).all()


def test_maximum_is_only_a_shift():
  """Large logits neither overflow nor lose the exp-sum's gradient."""
  problem = Problem(recent=1, shape=(7, 64))
  query, attended, *rest = problem.arguments()
  for shift in (-1e4, 1e4):
    part = attended._replace(max=attended.max + shift)
    got = run_kernels(problem, (query, part, *rest))
    compare(problem, got, run_oracle(problem, (query, part, *rest)))
    np.testing.assert_array_equal(got[1][1].max, 0.0)


def test_same_bits_every_run(small_tiles):
  problem = Problem(shape=(100, 130), dtype=BF16)
  arguments = problem.arguments()
  first, second = (run_kernels(problem, arguments) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.fast
def test_update_and_running_sum_share_a_gradient():
  _, gradients = check(Problem(shape=(7, 64), dtype=BF16, total_dtype=BF16))
  np.testing.assert_array_equal(gradients[2][-1], gradients[3])


def block_case(width, total_dtype, tokens=8192, **options):
  """A sublayer's read in Block AttnRes."""
  options = MergeOptions(1e-6, 1e-6, BF16, total_dtype, False)
  return Case(tokens, width, BF16, (total_dtype,), BF16, True, options)


@pytest.mark.fast
@pytest.mark.parametrize("width", [1168, 2304, 7168])
@pytest.mark.parametrize("total_dtype", [F32, BF16], ids=str)
def test_bytes_of_a_step(width, total_dtype):
  """3 reads and 2 writes of D; numbers per token cost next to nothing."""
  case = block_case(width, total_dtype)
  for direction, reads, writes in (
    ("forward", 3, 2),
    ("backward", 4, 3 if total_dtype == F32 else 2),
  ):
    kinds = [
      [b.kind for b in jax.tree.leaves(tree)]
      for tree in buffers(case, direction)
    ]
    assert [x.count("tokens") for x in kinds] == [reads, writes]
    plan = merge_tile(case, direction)
    assert plan.array_bytes <= plan.step_bytes <= 1.005 * plan.array_bytes
    assert plan.vmem_bytes <= chips.vmem_budget()


@pytest.mark.fast
def test_errors_name_the_way_out():
  problem = Problem(shape=(7, 64))
  arguments = list(problem.arguments())
  arguments[3] = arguments[3].astype(jnp.float16)
  with pytest.raises(NotImplementedError, match=r"float16.*\"xla\""):
    merge_kernels.merge(*arguments, problem.options)
  with pytest.raises(ValueError, match=r"D=262144 and 1 .*bytes.*\"xla\""):
    merge_tile(block_case(1 << 18, F32), "forward")
