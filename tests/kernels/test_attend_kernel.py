"""What the phase-1 kernels have beside their values (test_implementations.py):
plans, both kinds of matrix unit, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attnres_kernels.depth_attention import (
  api,
  chips,
  pallas_tpu_attend,
  static,
)
from tests.kernels import cases
from tests.kernels.cases import attend_case

CHIP_VERSIONS = {
  "v5e": pltpu.ChipVersion.TPU_V5E,
  "v5p": pltpu.ChipVersion.TPU_V5P,
  "v6e": pltpu.ChipVersion.TPU_V6E,
}
PHASE_1 = [case for case in static.CASES if case.op == "phase1"]


def use_chip(monkeypatch, chip):
  """Kernels are planned and traced as for this chip."""
  info = pltpu.get_tpu_info_for_chip(CHIP_VERSIONS[chip], 1)
  monkeypatch.setattr(chips, "info", lambda: info)


@pytest.mark.parametrize(
  "sizes", [(9, 3, 40, 96), (10, 2, 33, 130), (8, 1, 16, 64)], ids=str
)
def test_wide_matrix_units(monkeypatch, sizes):
  """A v6e sums both parts of a weight in one product."""
  use_chip(monkeypatch, "v6e")
  cases.check("pallas_tpu", attend_case(*sizes, "bfloat16"))


def test_default_plan(monkeypatch):
  """The tile, and the groups in flight, that nothing has made smaller."""
  case = attend_case(3, 2, 130, 64, "bfloat16")
  want = cases.run_oracle(case)
  monkeypatch.setitem(
    cases.IMPLEMENTATIONS_UNDER_TEST, "pallas_tpu", chips.interpreted
  )
  got = cases.run("pallas_tpu", case)
  cases.compare("value", got[0], want[0])
  cases.compare("gradient", got[1], want[1])


def test_more_queries_than_a_call_takes(monkeypatch):
  monkeypatch.setattr(pallas_tpu_attend, "MAX_QUERIES", 2)
  cases.check("pallas_tpu", attend_case(2, 5, 7, 64))


def test_bfloat16_weights_sum_to_one():
  """Sources of ones come out as ones: the weights are not rounded."""
  case = attend_case(9, 2, 33, 64, "bfloat16", query_size=5.0)
  sources = [v.at[..., -1].set(1.0) for v in case.arrays["sources"]]
  with cases.context("pallas_tpu"):
    attended = api.attend(
      case.arrays["queries"], sources, eps=cases.EPS,
      implementation="pallas_tpu",
    )  # fmt: skip
  for a in attended:
    np.testing.assert_array_equal(a.out[..., -1], 1.0)


def test_races_and_uninitialised_memory(monkeypatch):
  """The interpreter that knows of DMAs: nothing is read before it is written,
  with memory that starts as NaN and a width that fills no register."""
  case = attend_case(2, 2, 33, 70, "bfloat16")
  want = cases.run_oracle(case)
  params = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", dma_execution_mode="eager"
  )
  monkeypatch.setattr(chips, "tuned", lambda key: dict(tile=16, unroll=1))
  monkeypatch.setitem(
    cases.IMPLEMENTATIONS_UNDER_TEST,
    "pallas_tpu",
    lambda: chips.interpreted(params),
  )
  got = cases.run("pallas_tpu", case)
  cases.compare("value", got[0], want[0])
  cases.compare("gradient", got[1], want[1])


@pytest.mark.parametrize("chip", CHIP_VERSIONS)
@pytest.mark.parametrize(
  "case", PHASE_1, ids=lambda c: f"{c.model} R={c.sources}"
)
def test_plans_of_the_models_fit(monkeypatch, chip, case):
  use_chip(monkeypatch, chip)
  for direction in ("forward", "backward"):
    plan = pallas_tpu_attend.plan(
      direction, case.sources, case.queries, case.width, case.dtype, 4096
    )
    assert plan.vmem_bytes <= chips.vmem_budget()
    assert plan.tile in pallas_tpu_attend.TILES
    assert plan.tile % (pallas_tpu_attend.GROUP * plan.unroll) == 0


def test_what_does_not_fit_is_an_error(monkeypatch):
  use_chip(monkeypatch, "v5p")
  match = (
    r"got 400 sources and 24 queries of width 7168, bfloat16: a tile of 16"
    r" tokens takes \d+ bytes of VMEM, expected at most \d+ on v5p.*block_size"
  )
  with pytest.raises(ValueError, match=match):
    pallas_tpu_attend.plan("forward", 400, 24, 7168, jnp.bfloat16, 4096)


def test_other_dtypes_are_an_error():
  v = jnp.ones((4, 8), jnp.float16)
  with pytest.raises(NotImplementedError, match=r"got sources of float16.*xla"):
    api.attend(jnp.ones((1, 8)), [v], eps=1e-5, implementation="pallas_tpu")


def test_kernels_do_not_fall_back():
  """Named on a machine that can't run them, they raise."""
  v = jnp.ones((16, 128))
  with pytest.raises(ValueError, match="interpret"):
    api.attend(v[:1], [v], eps=1e-5, implementation="pallas_tpu")


def test_no_keys_are_kept():
  """Beside arguments and results: one number per token, source and query."""
  case = attend_case(3, 2, 64, 96, "bfloat16")
  sources = case.arrays["sources"]

  def attend(queries, sources):
    return api.attend(
      queries, sources, eps=cases.EPS, implementation="pallas_tpu"
    )

  with cases.context("pallas_tpu"):
    _, pull_back = jax.vjp(attend, case.arrays["queries"], sources)
  kept = [x.shape for x in jax.tree.leaves(pull_back)]
  wide = [shape for shape in kept if shape[-1] == 96]
  assert sorted(wide) == [(2, 96)] + [(64, 96)] * 3  # queries and sources
  # Chunks of 8 sources: logits and 1 / RMS; log-sum-exp and sum.
  scalars = sum(np.prod(shape) for shape in kept if shape[-1] != 96)
  assert scalars <= 64 * (8 * 2 + 8 + 2 * 2)
