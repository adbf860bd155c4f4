"""The loss against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.train.loss import bits_per_byte, loss_sums

pytestmark = pytest.mark.fast

# float32 sums of some hundred terms, each rounded to 2^-24 relative.
SUM_RTOL = 1e-6


def oracle(logits, targets, mask):
  logits = np.asarray(logits, np.float64)
  top = logits.max(-1, keepdims=True)
  log_z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
  nll = z = 0.0
  for index in np.ndindex(mask.shape):
    if mask[index]:
      nll += log_z[index] - logits[index][targets[index]]
      z += log_z[index] ** 2
  return nll, z, mask.sum()


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_sums_equal_float64(scale):
  rng = np.random.default_rng(0)
  logits = (scale * rng.normal(size=(3, 7, 11))).astype(np.float32)
  targets = rng.integers(0, 11, (3, 7), dtype=np.int32)
  mask = rng.integers(0, 2, (3, 7), dtype=np.int32)
  sums = loss_sums(jnp.array(logits), targets, mask)
  np.testing.assert_allclose(sums, oracle(logits, targets, mask), rtol=SUM_RTOL)


def test_masked_targets_do_not_matter():
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(2, 4, 5)).astype(np.float32)
  targets = rng.integers(0, 5, (2, 4), dtype=np.int32)
  mask = np.array([[1, 1, 0, 0], [0, 1, 1, 0]], np.int32)
  clean = loss_sums(jnp.array(logits), targets, mask)
  dirty_targets = np.where(mask, targets, 10_000)
  dirty_logits = np.where(mask[..., None], logits, np.inf)
  assert loss_sums(jnp.array(dirty_logits), dirty_targets, mask) == clean
  grads = jax.grad(lambda x: loss_sums(x, dirty_targets, mask).nll)(logits)
  assert np.all(np.isfinite(grads))
  assert not np.any(grads[mask == 0])


def test_logits_of_half_precision_are_summed_in_float32():
  logits = jnp.zeros((1, 4096, 4), jnp.bfloat16)
  targets = jnp.zeros((1, 4096), jnp.int32)
  sums = loss_sums(logits, targets, jnp.ones_like(targets))
  assert sums.nll.dtype == jnp.float32
  np.testing.assert_allclose(sums.nll, 4096 * np.log(4), rtol=SUM_RTOL)


def test_no_targets_is_zero():
  zero = jnp.zeros((1, 2), jnp.int32)
  assert [float(x) for x in loss_sums(jnp.ones((1, 2, 3)), zero, zero)] == [
    0.0, float(0), 0.0,
  ]  # fmt: skip


def test_bits_per_byte():
  # 8 targets at 2 bits each, that stand for 4 bytes.
  assert bits_per_byte(8 * 2 * np.log(2), 4) == pytest.approx(4.0)
