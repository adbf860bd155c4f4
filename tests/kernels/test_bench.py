"""The benchmark compares things that are equal, and says all it should."""

import jax

from attnres_kernels.depth_attention import bench
from tests.kernels import cases

TINY = bench.Shape(3, 3, 16, 5)


def test_benchmarked_blocks_are_one_function():
  """Same loss and gradients from every implementation."""
  inputs = bench.make_inputs(TINY)
  results = {
    name: bench.compile_block(name, inputs)(*inputs)
    for name in bench.BLOCKS
    if name != "pallas_tpu"  # the same calls; runs on a TPU only
  }
  for name, result in results.items():
    cases.compare(name, result, results["plain"])
    assert all(x.any() for x in jax.tree.leaves(result)), name


def test_rows():
  rows = bench.run([TINY], rounds=2)
  names = [row["implementation"] for row in rows]
  assert names == ["plain", "plain_two_phase", "xla"]
  assert rows[0]["time_ratio_to_plain"] == 1
  assert rows[0]["memory_ratio_to_plain"] == 1
  for row in rows:
    assert row["seconds"] > 0
    assert (row["R"], row["Q"], row["D"], row["tokens"]) == (3, 3, 16, 5)
    assert row["dtype"] == "float32"
    assert row["rounds"] == 2
    assert row["hardware"].startswith("cpu ")
