"""Every mechanism on meshes of 8 devices equals itself on one."""

import json

import pytest

from attnres_jax.depth_mixing import registry

# Each group runs in a process of its own.
GROUPS = {
  **{name: [(name, {})] for name in registry.MIXERS},
  "full_input_query": [("full", dict(query="input"))],
  "block_heads": [("block", dict(heads=4))],
}

CODE = """
from tests.parallel import equality
equality.check({mixers})
print("equal")
"""


@pytest.mark.parametrize("group", GROUPS)
def test_losses_and_gradients_equal_one_device(run_python, group):
  code = CODE.format(mixers=GROUPS[group])
  assert "equal" in run_python(code, devices=8)


COLLECTIVES = """
import json
from tests.parallel import equality
mesh = dict(data=1, seq=2, tensor=4)
print(json.dumps([
  equality.collectives("residual", mesh),
  equality.collectives("block", mesh, num_blocks=2),
]))
"""


def test_block_adds_no_collective_to_the_baseline(run_python):
  """But for the reduction of the gradients of queries and key scales."""
  output = run_python(COLLECTIVES, devices=8)
  baseline, block = json.loads(output.splitlines()[-1])
  assert {"all-gather", "reduce-scatter", "all-reduce"} <= baseline.keys()
  assert block.keys() == baseline.keys()
  for kind in baseline.keys() - {"all-reduce"}:
    assert block[kind] == baseline[kind], kind
  (count, size), (block_count, block_size) = (
    baseline["all-reduce"],
    block["all-reduce"],
  )
  assert block_count - count <= 2  # one per parameter, unless combined
  # Five queries and five key scales of width 32, float32.
  assert block_size - size == 2 * 5 * 32 * 4
