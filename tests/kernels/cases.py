"""Random inputs of `attend` and `merge`, and how results are compared.

Every implementation is held to the same oracle: reference.py in float64, its
gradients by autodiff, on the same inputs, whose rounding is thus no error.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from attnres_kernels.depth_attention import api, chips, reference
from attnres_kernels.depth_attention.types import Attended, MergeOptions


@contextlib.contextmanager
def interpreted_kernels():
  """TPU kernels on the CPU, with little unrolled: it compiles faster."""
  small = dict(tile=32, unroll=1)
  with (
    chips.interpreted(True),
    mock.patch.object(chips, "tuned", lambda key: small),
  ):
    yield


# name -> a context in which the implementation runs here.
IMPLEMENTATIONS_UNDER_TEST = {
  "xla": contextlib.nullcontext,
  "pallas_tpu": interpreted_kernels,
}

EPS = 1e-5

# Errors count relative to the largest entry of the array: entries near zero
# are differences of large ones. Cotangents have unit size; an array that is
# smaller than this is such a difference as a whole.
LEAST_SIZE = 1e-2
# float32: sums over R * D or T terms of 2^-24 each; logits of up to 10 pass
# their absolute error on to the weights.
FLOAT32 = 3e-5
# bfloat16 results are rounded once, at most 2^-9 of an entry; gradients are
# sums of two or three terms, of which a kernel may round one before the sum.
BFLOAT16 = 2**-7
# float64 through the same code: nothing but a wrong formula is this large.
FLOAT64 = 1e-11
# Every weight and their sum are rounded to 2^-24.
WEIGHT_SUM = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
  """Arguments of a call (a dict of arrays), and what they are run with.

  Attributes:
    op: attend | merge.
    arrays: the differentiable arguments by name; an absent one is None.
    static: the other keyword arguments of the api.
    seed: of the cotangents.
  """

  op: str
  arrays: dict
  static: dict
  seed: int = 0


def normal(rng, shape, dtype=jnp.float32, size=1.0):
  return jnp.asarray(size * rng.standard_normal(shape), dtype)


def _values(rng, shape, dtype, sizes, common):
  shared = common * jnp.linspace(-1, 1, shape[-1])
  return tuple(
    (shared + normal(rng, shape, size=size)).astype(dtype) for size in sizes
  )


def attend_case(
  count, queries, tokens, width, dtype="float32", *, lead=(), eps=EPS,
  scaled=True, seed=0, query_size=1.0, sizes=None, common=0.0,
):  # fmt: skip
  """Random sources; logits of about `query_size`.

  Args:
    count: R.
    lead: axes before T.
    scaled: with key-norm scales.
    sizes: R factors for the sources; None: ones.
    common: size of a vector that all sources share.
  """
  rng = np.random.default_rng([seed, count, queries, tokens, width])
  shape = (*lead, tokens, width)
  sizes = [1.0] * count if sizes is None else sizes
  arrays = dict(
    queries=normal(rng, (queries, width), size=query_size / width**0.5),
    sources=_values(rng, shape, dtype, sizes, common),
    scales=1 + normal(rng, (queries, width), size=0.3) if scaled else None,
  )
  return Case("attend", arrays, dict(eps=eps), seed)


def merge_case(
  count, tokens, width, dtype="float32", *, lead=(), attended=True,
  update=True, recent_dtype=None, eps=EPS, norm_eps=EPS, scaled=True,
  total_dtype="float32", return_merged=False, seed=0, query_size=1.0,
  sizes=None, common=0.0,
):  # fmt: skip
  """Like `attend_case`; `count` recent sources, `dtype` that of the others."""
  rng = np.random.default_rng([seed, count, tokens, width])
  shape = (*lead, tokens, width)
  sizes = [1.0] * count if sizes is None else sizes
  finished = None
  if attended:
    finished = Attended(
      normal(rng, shape, dtype),
      normal(rng, shape[:-1]),
      jnp.exp(abs(normal(rng, shape[:-1]))),
    )
  recent_dtype = recent_dtype or dtype
  arrays = dict(
    query=normal(rng, (width,), size=query_size / width**0.5),
    attended=finished,
    recent=_values(rng, shape, recent_dtype, sizes, common),
    update=normal(rng, shape, dtype) if update and count else None,
    scale=1 + normal(rng, (width,), size=0.3) if scaled else None,
    norm_scale=1 + normal(rng, (width,), size=0.3) if scaled else None,
  )
  static = dict(
    eps=eps, norm_eps=norm_eps, total_dtype=total_dtype,
    return_merged=return_merged,
  )  # fmt: skip
  return Case("merge", arrays, static, seed)


def context(implementation: str):
  return IMPLEMENTATIONS_UNDER_TEST.get(
    implementation, contextlib.nullcontext
  )()


def run(implementation: str, case: Case):
  """(result, gradients by name) of an implementation, through the api."""
  call = _call_api(case.op, implementation, tuple(case.static.items()))
  with context(implementation):
    result = jax.eval_shape(call, case.arrays)
    return with_gradients(call)(case.arrays, _cotangents(case, result))


def run_oracle(case: Case):
  """(result, gradients by name) in float64."""
  static = tuple(case.static.items())
  # The cotangents are those that the implementations get: rounded.
  result = jax.eval_shape(_call_api(case.op, "reference", static), case.arrays)
  inputs = _float64((case.arrays, _cotangents(case, result)))
  with jax.enable_x64(True):
    return with_gradients(_call_reference(case.op, static), fast=True)(*inputs)


def check(implementation: str, case: Case, tolerance=None):
  """Values and all gradients against the oracle."""
  if tolerance is None and case.static.get("total_dtype") == "bfloat16":
    # A derivative may be taken at the total as it was rounded.
    tolerance = BFLOAT16
  got, want = run(implementation, case), run_oracle(case)
  compare("value", got[0], want[0], tolerance)
  compare("gradient", got[1], want[1], tolerance)


def compare(what, got, want, tolerance=None):
  """Every array by its largest error relative to the largest entry wanted."""
  got, want = (jax.tree_util.tree_leaves_with_path(x) for x in (got, want))
  for (path, a), (_, b) in zip(got, want, strict=True):
    name = what + jax.tree_util.keystr(path)
    allowed = tolerance
    if allowed is None:
      allowed = BFLOAT16 if a.dtype == jnp.bfloat16 else FLOAT32
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, name
    assert np.all(np.isfinite(a)), name
    size = max(np.max(np.abs(b)), LEAST_SIZE)
    error = np.max(np.abs(a - b))
    assert error <= allowed * size, (
      f"{name}: error {error:.2e}, allowed {allowed:.1e} of {size:.2e}"
    )


@functools.cache
def _call_api(op, implementation, static):
  """arrays -> result."""

  def call(arrays):
    options = dict(static, implementation=implementation)
    if op == "attend":
      return api.attend(**arrays, **options)
    return api.merge(**arrays, **options)

  return call


@functools.cache
def _call_reference(op, static):
  """The oracle without the api, which would round queries to float32."""
  options = dict(static)

  def scaled(query, scale):
    return query if scale is None else query * scale

  def call(arrays):
    if op == "attend":
      c = scaled(arrays["queries"], arrays["scales"])
      return reference.attend(c, arrays["sources"], options["eps"])
    return reference.merge(
      scaled(arrays["query"], arrays["scale"]),
      *(arrays[k] for k in ("attended", "recent", "update", "norm_scale")),
      MergeOptions(
        options["eps"],
        options["norm_eps"],
        jnp.dtype("float64"),
        jnp.dtype("float64"),
        options["return_merged"],
      ),
    )

  return call


@functools.cache
def with_gradients(call, fast=False):
  """(arrays, cotangents) -> (result, gradients), compiled; `fast`: quickly."""
  options = {"xla_backend_optimization_level": "0"} if fast else {}

  @functools.partial(jax.jit, compiler_options=options)
  def run_both(arrays, cotangents):
    result, pull_back = jax.vjp(call, arrays)
    return result, pull_back(cotangents)[0]

  return run_both


def _cotangents(case, result):
  """Random, of the result's shapes. `max` gets one too: it must not matter."""
  rng = np.random.default_rng([case.seed, 99])
  return jax.tree.map(lambda x: normal(rng, x.shape, x.dtype), result)


def _float64(tree):
  with jax.enable_x64(True):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)
