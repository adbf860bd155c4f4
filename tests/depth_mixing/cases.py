"""The mechanisms under test, a toy model around them, and their oracles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnres_jax.depth_mixing import base, registry
from tests.depth_mixing import oracles

# L, B, T, D of the toy model. D is divisible by the 4 depth heads of a case.
DEPTH, BATCH, TOKENS, WIDTH = 5, 2, 5, 16
EPS = oracles.EPS

# name -> (mechanism, options). Every registered mechanism must have a case.
CASES = {
  "residual": ("residual", {}),
  "full": ("full", {}),
  "full_group_1": ("full", dict(group_size=1)),
  "full_group_100": ("full", dict(group_size=100)),
  "full_single_phase": ("full", dict(schedule="single_phase")),
  "full_input": ("full", dict(query="input")),
  "full_input_previous": ("full", dict(query="input", query_input="previous")),
  "full_none": ("full", dict(query="none")),
  "full_sigmoid": ("full", dict(activation="sigmoid")),
  "full_normalised_sigmoid": ("full", dict(activation="normalised_sigmoid")),
  "full_raw_keys": ("full", dict(key_norm=False)),
  "full_heads": ("full", dict(heads=4)),
  "block_1": ("block", dict(block_size=1)),
  "block_2": ("block", dict(block_size=2)),
  "block_3": ("block", dict(block_size=3)),
  "block_all": ("block", dict(block_size=DEPTH)),
  "block_beyond": ("block", dict(block_size=DEPTH + 3)),
  "block_num": ("block", dict(num_blocks=2)),
  "block_single_phase": ("block", dict(block_size=3, schedule="single_phase")),
  "block_input": ("block", dict(block_size=2, query="input")),
  "block_none": ("block", dict(block_size=3, query="none")),
  "block_sigmoid": ("block", dict(block_size=3, activation="sigmoid")),
  "block_raw_keys": ("block", dict(block_size=3, key_norm=False)),
  "block_heads": ("block", dict(block_size=3, heads=4)),
  "full_xla": ("full", dict(implementation="xla")),
  "full_reference": ("full", dict(implementation="reference")),
  "block_xla": ("block", dict(block_size=3, implementation="xla")),
  "block_reference": ("block", dict(block_size=3, implementation="reference")),
  "window_2": ("sliding_window", dict(window=2)),
  "window_1_none": ("sliding_window", dict(window=1, query="none")),
  "window_beyond": ("sliding_window", dict(window=DEPTH + 1)),
  "denseformer": ("denseformer", {}),
  "denseformer_period": ("denseformer", dict(period=2)),
  "denseformer_dilation": ("denseformer", dict(dilation=3)),
  "denseformer_both": ("denseformer", dict(period=2, dilation=2)),
  "mhc": ("mhc", {}),
  "mhc_2": ("mhc", dict(streams=2)),
  "mhc_lite": ("mhc_lite", dict(streams=3)),
}

KINDS = (
  "residual", "full", "full_input_previous", "full_heads", "block_3",
  "block_reference", "block_sigmoid", "window_2", "denseformer_both", "mhc_2",
  "mhc_lite",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Toy:
  """A mechanism with random parameters around tanh sublayers."""

  graphdef: nnx.GraphDef
  parameters: nnx.State
  matrices: jax.Array  # [L, D, D]
  embedding: jax.Array  # [B, T, D]
  oracle: object
  options: dict


class ToyNorm(base.FusableNorm):
  """An RMSNorm; without a scale it is the PreNorm of every toy sublayer."""

  def __init__(self, scale=None):
    self.scale = scale
    self.eps = EPS

  def __call__(self, v):
    wide = v.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(mean + EPS)
    if self.scale is not None:
      wide = wide * self.scale
    return wide.astype(v.dtype)


toy_norm = ToyNorm()


@functools.cache
def toy(case: str, depth: int = DEPTH, random: bool = True) -> Toy:
  """Builds a case; `random` replaces its initial parameters by noise."""
  name, options = CASES[case]
  mixer = registry.build(name, depth, WIDTH, norm_eps=EPS, **options)
  graphdef, parameters = nnx.split(mixer)
  if random:
    leaves, tree = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    # Large enough that a wrong weight shows, small enough not to saturate.
    leaves = [
      x + 0.5 * jax.random.normal(k, x.shape)
      for x, k in zip(leaves, keys, strict=True)
    ]
    parameters = jax.tree.unflatten(tree, leaves)
  keys = jax.random.split(jax.random.key(depth), 2)
  return Toy(
    graphdef,
    parameters,
    # Outputs of about the embedding's size: every source counts.
    1.5 * jax.random.normal(keys[0], (depth, WIDTH, WIDTH)) / WIDTH**0.5,
    jax.random.normal(keys[1], (BATCH, TOKENS, WIDTH)),
    oracles.ORACLES[name],
    options,
  )


def run(t: Toy, parameters, matrices, embedding, remat="none", observe=None):
  """The toy model: what the head sees."""

  def sublayer(matrix):
    return lambda h: jnp.tanh(
      jnp.matmul(h, matrix.astype(h.dtype), precision="highest")
    )

  return base.run(
    nnx.merge(t.graphdef, parameters),
    embedding,
    [(toy_norm, sublayer(m)) for m in matrices],
    remat=remat,
    observe=observe,
  )


def run_weights(t: Toy, parameters, matrices, embedding):
  """(what the head sees, list of weights)."""
  seen = {}
  h = run(t, parameters, matrices, embedding, observe=seen.__setitem__)
  return h, [seen[l] for l in range(len(matrices) + 1)]


@functools.cache
def jitted(case: str):
  """(parameters, matrices, embedding) -> (h, weights), compiled."""
  return jax.jit(functools.partial(run_weights, toy(case)))


def run_oracle(t: Toy, parameters, matrices, embedding):
  """The same model in float64 NumPy."""
  plain = _plain(nnx.to_pure_dict(parameters))
  matrices = np.asarray(matrices, np.float64)
  sublayers = [
    lambda h, m=m: np.tanh(oracles.rms_norm(h) @ m) for m in matrices
  ]
  embedding = np.asarray(embedding, np.float64)
  return t.oracle(t.options, plain, embedding, sublayers)


def _plain(tree):
  if isinstance(tree, dict):
    return {k: _plain(v) for k, v in tree.items()}
  return np.asarray(tree, np.float64)
