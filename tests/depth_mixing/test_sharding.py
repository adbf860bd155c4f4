"""Mixing is per token: sharded tokens need no communication."""

CODE = """
import re
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.depth_mixing import cases

for case in ("full", "block_3", "denseformer", "mhc_2"):
  t = cases.toy(case)
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  tokens, copies = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
  embedding = jnp.concatenate([t.embedding] * 2)  # one row per device

  def value(parameters, matrices, embedding):
    return cases.run(t, parameters, matrices, embedding)

  def gradient(*inputs):
    return jax.grad(lambda x: jnp.sum(jnp.sin(value(*x))))(inputs)

  inputs = (t.parameters, t.matrices, embedding)
  placed = jax.device_put(inputs, (copies, copies, tokens))
  f = jax.jit(value, out_shardings=tokens).lower(*placed).compile()
  found = re.findall("all-|collective-|reduce-scatter", f.as_text())
  assert not found, (case, found)
  np.testing.assert_allclose(f(*placed), jax.jit(value)(*inputs), atol=1e-5)
  g = jax.jit(gradient, out_shardings=(copies, copies, tokens))
  # Parameters' gradients are summed over the batch; nothing else moves.
  text = g.lower(*placed).compile().as_text()
  assert not re.findall("all-gather|all-to-all|collective-", text), case
  for a, b in zip(
    jax.tree.leaves(g(*placed)), jax.tree.leaves(jax.jit(gradient)(*inputs)),
    strict=True,
  ):
    size = max(1.0, float(np.abs(b).max()))
    np.testing.assert_allclose(a / size, b / size, atol=1e-5)
print("checked")
"""


def test_sharded_tokens_equal_unsharded_without_communication(run_python):
  """Values and gradients on 4 devices; float32 in another order of sums."""
  assert "checked" in run_python(CODE, devices=4)
