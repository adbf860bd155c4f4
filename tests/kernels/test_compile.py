"""The kernels compile for TPUs, whatever this machine is; how schedules and
programs are read."""

import pytest

from attnres_kernels.depth_attention import static

COMPILE = """
import os
from attnres_kernels.depth_attention import static
os.environ.update(static.compiler_environment())
mesh = static.tpu_mesh(static.CHIPS[{chip!r}].topology)
jax.set_mesh(mesh)
for case in {cases}:
  case = static.Case(*case)
  name = dict(phase1="attend", phase2="merge")[case.op]
  for direction in ("forward", "backward"):
    text = static._compile(case, {implementation!r}, mesh, direction).as_text()
    calls = [x for x in text.splitlines() if "tpu_custom_call" in x]
    assert any(f"attnres_{{name}}_{{direction}}" in x for x in calls), case
    assert not any(x in text for x in ("all-reduce", "all-gather")), case
    print("compiled", case.model, case.op, direction)
"""

# The shapes of the models, and shapes that fill no tile.
MODELS = [
  case
  for case in static.CASES
  if case.model in ("436M", "48B", "K3") and case.total_dtype != "bfloat16"
]
RAGGED = [
  static.Case("ragged", "phase1", 3, 2, 130, tokens=7),
  static.Case("ragged", "phase1", 9, 5, 1000, dtype="float32", tokens=100),
  static.Case("ragged", "phase2", 1, 1, 130, "float32", tokens=7),
]


@pytest.mark.slow
@pytest.mark.parametrize("chip", static.CHIPS)
def test_kernels_compile(run_python, chip):
  """Asked for by name, on a machine without a TPU."""
  cases = [tuple(case) for case in MODELS + RAGGED]
  code = COMPILE.format(chip=chip, cases=cases, implementation="pallas_tpu")
  assert run_python(code, devices=1).count("compiled") == 2 * len(cases)


@pytest.mark.slow
def test_kernels_are_the_default_for_a_tpu(run_python):
  """Of the mesh in use, though this machine's own device is a CPU."""
  cases = [tuple(RAGGED[0]), tuple(RAGGED[2])]
  code = COMPILE.format(chip="v5e", cases=cases, implementation=None)
  assert run_python(code, devices=1).count("compiled") == 4


SCHEDULE = """
== a kernel
 0x1   :  { %1 = nop }
 0x2 LB: > { %2 = nop }
 0x3   : > { %3 = nop }
 0x4 LB: >> { %4 = nop }
 0x5   : >> { %p6 = scmp.ge.s32.totalorder %s9, 8 /* loop exit test */ }
 0x6   : > { %4 = nop (%p6) }
 0x7   : >> { %4 = nop }
 0x8   : > { %p6 = scmp.ge.s32.totalorder %s9, 34 /* loop exit test */ }
 0x9   :  { %5 = nop }
"""


def test_bundles_of_a_step(tmp_path):
  """Three bundles of the grid, and eight times four of the loop in it."""
  path = tmp_path / "final_bundles.txt"
  path.write_text(SCHEDULE)
  assert static.step_bundles(path) == 3 + 8 * 4


PROGRAM = """HloModule jit_f

ENTRY %main (a: f32[5,130]) -> f32[5,130] {
  %a = f32[5,130]{1,0:T(8,128)} parameter(0)
  %b = bf16[5,130]{1,0:T(8,128)(2,1)S(1)} fusion(%a), kind=kLoop, calls=%f
  %c = (f32[5,130]{1,0:T(8,128)}, bf16[16,128]{1,0:T(8,128)(2,1)}) custom-call(%b, /*index=1*/%a), x=")"
  %d = f32[5,130]{1,0:T(8,128)} get-tuple-element(%c), index=0
  %e = (f32[5,130]{1,0:T(8,128)S(1)}, f32[5,130]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%d)
  ROOT %g = f32[5,130]{1,0:T(8,128)S(1)} copy-done(%e)
}
"""  # noqa: E501


def test_bytes_of_a_program():
  """Whole tiles; what lies in VMEM moves for nothing; copies count once."""
  padded = 8 * 256 * 4
  fusion = padded
  call = padded + padded + 16 * 128 * 2
  copy = padded
  assert static.hbm_bytes(PROGRAM) == fusion + call + copy


def test_missing_compiler_is_an_error(monkeypatch):
  monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere/libtpu.so")
  with pytest.raises(RuntimeError, match=r"no TPU compiler.*make env"):
    static.compiler_environment()


@pytest.mark.parametrize("case", static.CASES, ids=str)
def test_least_bytes(case):
  """More in the backward pass; D in whole registers."""
  forward, backward = (
    static.floor_bytes(case, d) for d in ("forward", "backward")
  )
  assert 0 < forward < backward
  assert forward % 256 == 0
