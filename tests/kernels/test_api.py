"""What api.py decides before an implementation runs."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels.depth_attention import api
from attnres_kernels.depth_attention.types import Attended
from tests.kernels.cases import attend_case


def test_default_is_xla_off_tpu_and_says_so_once(caplog):
  api._log_once.cache_clear()
  case = attend_case(3, 2, 65, 96)
  with caplog.at_level(logging.INFO, logger=api.__name__):
    for _ in range(2):
      got = api.attend(**case.arrays, **case.static)
  want = api.attend(**case.arrays, **case.static, implementation="xla")
  jax.tree.map(np.testing.assert_array_equal, got, want)
  (record,) = caplog.records
  assert "attend: implementation xla (the platform is cpu)" in (
    record.getMessage()
  )


V, W = jnp.ones((2, 3, 8)), jnp.ones((1, 8))
DONE = Attended(V, V[..., 0], V[..., 0])
ERRORS = {
  "no_sources": (
    lambda: api.attend(W, [], eps=1e-5),
    r"got no sources: expected at least one",
  ),
  "query_width": (
    lambda: api.attend(jnp.ones((1, 7)), [V], eps=1e-5),
    r"got queries of shape \(1, 7\): expected \[Q, 8\]",
  ),
  "no_queries": (
    lambda: api.attend(jnp.ones((0, 8)), [V], eps=1e-5),
    r"got queries of shape \(0, 8\): .* Q >= 1",
  ),
  "shapes": (
    lambda: api.attend(W, [V, V[:1]], eps=1e-5),
    r"got sources of shapes .*: expected one shape .* number 1 differs",
  ),
  "no_tokens_axis": (
    lambda: api.attend(W, [jnp.ones(8)], eps=1e-5),
    r"expected one shape \[..., T, D\]; number 0 differs",
  ),
  "dtypes": (
    lambda: api.attend(W, [V, V.astype("bfloat16")], eps=1e-5),
    r"\['float32', 'bfloat16'\]: expected one dtype; cast",
  ),
  "integers": (
    lambda: api.attend(W, [V.astype("int32")], eps=1e-5),
    r"got sources of dtype int32: expected floating",
  ),
  "scales": (
    lambda: api.attend(W, [V], scales=jnp.ones((2, 8)), eps=1e-5),
    r"got scales of shape \(2, 8\): expected \(1, 8\)",
  ),
  "implementation": (
    lambda: api.attend(W, [V], eps=1e-5, implementation="cuda"),
    r"got implementation 'cuda': expected None or one of reference, xla",
  ),
  "nothing_to_merge": (
    lambda: api.merge(W[0], None, [], eps=1e-5),
    r"got 0 recent sources, attended absent, update absent: expected",
  ),
  "update_alone": (
    lambda: api.merge(W[0], DONE, [], V, eps=1e-5),
    r"got 0 recent sources, attended present, update present: expected",
  ),
  "merge_width": (
    lambda: api.merge(W[0, :5], DONE, [V], eps=1e-5),
    r"got query of shape \(5,\): expected \(8,\)",
  ),
  "norm_scale": (
    lambda: api.merge(W[0], DONE, [V], norm_scale=W, eps=1e-5),
    r"got norm_scale of shape \(1, 8\): expected \(8,\)",
  ),
  "merge_shapes": (
    lambda: api.merge(W[0], DONE, [V[:, :2]], eps=1e-5),
    r"got attended.out, recent and update of shapes .*: expected one shape",
  ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_say_got_and_expected(error):
  call, match = ERRORS[error]
  with pytest.raises(ValueError, match=match):
    call()
