"""One training step's loss and gradients on meshes of 8 devices, and on one.

Called in a process of its own that has 8 devices:
`check(mixers, meshes)` raises unless they are equal.
"""

import jax
import numpy as np
from flax import nnx

from attnres_jax.model.decoder import build_model
from attnres_jax.parallel import hlo, rules
from attnres_jax.parallel.mesh import make_mesh
from attnres_jax.train.gradients import make_gradients
from attnres_jax.train.program import BATCH_KEYS
from configs.train import get_config

# data / fsdp / seq / tensor
MESHES = {
  "data=8": dict(data=8),
  "data=seq=tensor=2": dict(data=2, seq=2, tensor=2),
  "tensor=8": dict(data=1, tensor=8),
  "data=2,fsdp=4": dict(data=2, fsdp=4),
  "fsdp=seq=tensor=2": dict(data=1, fsdp=2, seq=2, tensor=2),
}

# float32 sums in another order: a few hundred terms, of which a gradient is
# what is left after cancellation. A missing or doubled term is off by 0.1.
LOSS_RTOL = 1e-5
GRADIENT_TOL = 2e-4  # of a parameter's largest gradient
# The least that counts as a gradient: the first sublayer reads one source, so
# its query's is rounding only.
SMALLEST = 1e-4


def config_of(mixer: str, **options):
  """Micro shapes that 8 divides, whatever is split."""
  config = get_config(f"{mixer},size=micro")
  config.model.layers = 2
  config.model.heads = config.model.kv_heads = 8
  config.data.batch_size = 8
  config.data.vocab_size = 64
  config.opt.z_loss = 1e-3
  for key, value in options.items():
    config.mixer[key] = value
  return config


def batch_of(config):
  """Documents that cross the borders of shards; uneven masks."""
  rng = np.random.default_rng(0)
  shape = config.data.batch_size, config.data.seq_len
  tokens, targets = rng.integers(0, config.data.vocab_size, (2, *shape))
  segments = np.cumsum(rng.random(shape) < 0.1, axis=1)
  starts = np.maximum.accumulate(
    np.where(np.diff(segments, prepend=-1) != 0, np.arange(shape[1]), 0), axis=1
  )
  mask = rng.random(shape) < np.linspace(0.1, 1, shape[0])[:, None]
  values = tokens, targets, np.arange(shape[1]) - starts, segments, mask
  return {
    key: np.asarray(value, np.int32)
    for key, value in zip(BATCH_KEYS, values, strict=True)
  }


def parameters_of(config):
  """No zeros: zero queries would hide what flows through them."""
  params = nnx.state(build_model(config, 0), nnx.Param)
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: x + 0.2 * rng.standard_normal(x.shape, np.float32), params
  )


def compiled(config, mesh_sizes):
  """The gradient function of a mesh, compiled; and its mesh."""
  for axis in rules.AXES:
    config.mesh[axis] = mesh_sizes.get(axis, 1)
  mesh = make_mesh(config)
  model = nnx.eval_shape(lambda: build_model(config, 0, rules.shards(mesh)))
  graphdef, params = nnx.split(model, nnx.Param)
  function = make_gradients(config, graphdef, mesh)
  sharded = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    params, rules.shardings(params, mesh),
  )  # fmt: skip
  batch = {
    key: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.NamedSharding(mesh, rules.BATCH)
    )
    for key, x in batch_of(config).items()
  }
  return jax.jit(function).lower(sharded, batch).compile(), mesh


def gradients(config, mesh_sizes):
  """(mean loss, {parameter: gradient}) of one step."""
  function, mesh = compiled(config, mesh_sizes)
  params = parameters_of(config)
  params = jax.device_put(params, rules.shardings(params, mesh))
  batch = jax.device_put(batch_of(config), jax.NamedSharding(mesh, rules.BATCH))
  sums, grads = function(params, batch)
  flat = jax.tree_util.tree_flatten_with_path(grads)[0]
  named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}
  return float(sums.nll / sums.targets), named


def check(mixers, meshes=tuple(MESHES)) -> None:
  """Raises AssertionError where a mesh differs from one device.

  Args:
    mixers: (name, options) each.
    meshes: keys of MESHES.
  """
  for mixer, options in mixers:
    loss, wanted = gradients(config_of(mixer, **options), dict(data=1))
    for name in meshes:
      where = mixer, options, name
      got_loss, got = gradients(config_of(mixer, **options), MESHES[name])
      np.testing.assert_allclose(got_loss, loss, rtol=LOSS_RTOL, err_msg=where)
      assert got.keys() == wanted.keys()
      for key, value in wanted.items():
        size = max(SMALLEST, float(np.abs(value).max()))
        error = float(np.abs(got[key] - value).max()) / size
        assert error < GRADIENT_TOL, (where, key, error)


def collectives(mixer, mesh_sizes, **options):
  """Collectives of the gradient's program by kind: (count, bytes)."""
  function, _ = compiled(config_of(mixer, **options), mesh_sizes)
  return hlo.collectives(function.as_text())
