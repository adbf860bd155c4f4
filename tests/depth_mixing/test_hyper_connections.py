"""mHC: the constraints on its coefficients, and Sinkhorn's order."""

import jax
import numpy as np
import pytest

from attnres_jax.depth_mixing import hyper_connections, registry

# Twenty float32 normalisations of a 4 x 4 matrix.
SINKHORN_TOLERANCE = 1e-5


@pytest.mark.fast
def test_sinkhorn_divides_columns_first_then_rows():
  """After any number of steps the rows are exact and the columns are not."""
  logits = jax.random.normal(jax.random.key(0), (3, 4, 4)) * 2
  want = np.exp(np.asarray(logits, np.float64))
  want /= want.sum(-2, keepdims=True)
  want /= want.sum(-1, keepdims=True)
  got = hyper_connections.sinkhorn(logits, steps=1)
  np.testing.assert_allclose(got, want, atol=SINKHORN_TOLERANCE)
  np.testing.assert_allclose(got.sum(-1), 1.0, atol=SINKHORN_TOLERANCE)
  assert np.abs(got.sum(-2) - 1).max() > 1e-2


@pytest.mark.parametrize("name", ["mhc", "mhc_lite"])
def test_coefficients_obey_their_constraints(name):
  """pre in (0, 1), post in (0, 2), residual doubly stochastic."""
  mixer = registry.build(name, 4, 16, norm_eps=1e-5, streams=4)
  key = jax.random.key(1)
  mixer.projection[...] = jax.random.normal(key, mixer.projection.shape)
  mixer.gates[...] += 0.5
  mixer.bias[...] = jax.random.normal(key, mixer.bias.shape)
  state = mixer.start(jax.random.normal(key, (2, 3, 16)))
  (x,) = mixer.open(state, range(1, 2))[1]
  pre, mixing = mixer._coefficients(state, x)
  residual, post = np.asarray(mixing[..., :4]), np.asarray(mixing[..., 4])
  assert 0 < pre.min() and pre.max() < 1
  assert 0 < post.min() and post.max() < 2 and post.max() > 1
  assert residual.min() >= 0
  # 20 steps leave the columns of a random matrix this close to 1.
  np.testing.assert_allclose(residual.sum(-1), 1, atol=1e-5)
  np.testing.assert_allclose(residual.sum(-2), 1, atol=2e-2)


@pytest.mark.parametrize("name", ["mhc", "mhc_lite"])
def test_initial_coefficients(name):
  """Identity residual, one favoured stream: 0.73 / 0.27 and 1.46 / 0.54."""
  mixer = registry.build(name, 6, 16, norm_eps=1e-5, streams=4)
  state = mixer.start(jax.random.normal(jax.random.key(0), (1, 1, 16)))
  for l in range(6):
    (x,) = mixer.open(state, range(l, l + 1))[1]
    pre, mixing = mixer._coefficients(state, x)
    want = np.full(4, 0.2689)
    want[l % 4] = 0.7311
    np.testing.assert_allclose(pre[0, 0], want, atol=1e-4)
    np.testing.assert_allclose(mixing[0, 0, :, 4], 2 * want, atol=2e-4)
    np.testing.assert_allclose(mixing[0, 0, :, :4], np.eye(4), atol=0.01)
