"""What the TPU compiler makes of the op, without a TPU.

libtpu compiles for a named chip on any machine and can write down the schedule
of every kernel: one bundle of instructions issues per cycle, so the bundles of
a grid step are its compute cycles but for waits. `cycles` has the waits that
the compiler knows of as well (for matrix units, sums over lanes, exp). The HBM
floor of the same step is the time its operands and results take at the chip's
bandwidth, each moved once. A pipelined kernel takes about the larger of the
two, so a ratio below 1 is arithmetic that hides under memory. Stalls of DMAs
don't show: these are figures "compiled for TPU, static", not measured.

`measure` runs each compilation in a process of its own, since the compiler
reads where to write schedules only once.
"""

import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

EPS = 1e-6

# The forward as inference has it; as training has it, with what is saved per
# token for the backward; the backward. With the name of the kernel in each.
DIRECTIONS = {
  "forward": "-attnres_{}_forward",
  "forward_saving": "jvp_attnres_{}_forward",
  "backward": "attnres_{}_backward",
}


class Chip(NamedTuple):
  """A core of a TPU.

  Attributes:
    topology: a slice to compile for.
    bandwidth: HBM bytes per second and core.
    clock: cycles per second.
    matmul_flops: published peak of the matrix units per second and core.
  """

  topology: str
  bandwidth: float
  clock: float
  matmul_flops: float


CHIPS = {
  "v5e": Chip("v5e:2x2", 819e9, 1.5e9, 197e12),
  # Two cores share the chip's 2765 GB/s and 459 TFLOP/s.
  "v5p": Chip("v5p:2x2x1", 2765e9 / 2, 1.75e9, 459e12 / 2),
  "v6e": Chip("v6e:2x2", 1640e9, 1.5e9, 918e12),
}


class Case(NamedTuple):
  """A shape to compile.

  Attributes:
    model: whose shape it is.
    op: phase1 | phase2.
    sources: R; for phase2 the recent sources, without the finished part.
    queries: Q.
    width: D.
    total_dtype: phase2 with a running sum: its dtype; None: without.
    dtype: of everything else.
    tokens: T.
  """

  model: str
  op: str
  sources: int
  queries: int
  width: int
  total_dtype: str | None = None
  dtype: str = "bfloat16"
  tokens: int = 4096


CASES = (
  # The shape that first kernels were compared on.
  Case("design", "phase1", 9, 12, 2304),
  # 32 sublayers in 8 blocks of 4: its last block, and its output.
  Case("436M", "phase1", 8, 4, 1168),
  Case("436M output", "phase1", 9, 1, 1168),
  # 54 sublayers in 9 blocks of 6.
  Case("48B", "phase1", 9, 6, 2304),
  Case("48B output", "phase1", 10, 1, 2304),
  # 186 sublayers in blocks of 24.
  Case("K3", "phase1", 9, 24, 7168),
  # Full at 32 sublayers, its last group of 4.
  Case("436M Full", "phase1", 29, 4, 1168),
  Case("436M", "phase2", 1, 1, 1168, "float32"),
  Case("48B", "phase2", 1, 1, 2304, "float32"),
  Case("K3", "phase2", 1, 1, 7168, "float32"),
  Case("436M", "phase2", 1, 1, 1168, "bfloat16"),
  Case("48B", "phase2", 1, 1, 2304, "bfloat16"),
  Case("K3", "phase2", 1, 1, 7168, "bfloat16"),
  Case("436M Full", "phase2", 3, 1, 1168),
)


def measure(
  chip: str, case: Case, implementation: str, plan: dict | None = None
) -> list[dict]:
  """Compiles a case for a chip; a row for each of DIRECTIONS.

  Args:
    chip: a key of CHIPS.
    case: a shape.
    implementation: pallas_tpu | xla.
    plan: stands for every entry of tuned/<chip>.json; None: the entries.

  Raises:
    RuntimeError: the compilation failed; carries what it wrote.
  """
  kernels = implementation == "pallas_tpu"
  with tempfile.TemporaryDirectory() as folder:
    env = compiler_environment()
    if kernels:
      env["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
      )
    command = [sys.executable, "-m", __spec__.name, chip, implementation]
    done = subprocess.run(
      [*command, json.dumps(case), json.dumps(plan)],
      env=env,
      capture_output=True,
      text=True,
      check=False,
    )
    if done.returncode:
      raise RuntimeError(
        f"{implementation} did not compile for {chip}, {case}:\n"
        + done.stderr[-4000:]
      )
    rows = json.loads(done.stdout.splitlines()[-1])
    if kernels:  # the schedules are complete once the process has ended
      for row in rows:
        _add_bundles(row, pathlib.Path(folder))
  return rows


def _add_bundles(row: dict, folder: pathlib.Path) -> None:
  name = {"phase1": "attend", "phase2": "merge"}[row["op"]]
  for key, ratio, stage in (
    ("bundles", "ratio", "final_bundles"),
    # Before the compiler takes out the bundles that only wait for a result:
    # the chip waits all the same.
    ("cycles", "cycles_ratio", "packed-bundles-post-ra"),
  ):
    kernel = DIRECTIONS[row["direction"]].format(name)
    paths = folder.glob(f"*{kernel}*{stage}.txt")
    (path,) = (p for p in paths if "schedule-analysis" not in p.name)
    row[key] = step_bundles(path)
    row[ratio] = round(row[key] / row["floor_cycles"], 3)


def floor_bytes(case: Case, direction: str) -> int:
  """Bytes per token if every operand and result moves once; what is saved for
  the backward is not counted.

  Arrays lie in memory with D rounded up to 128 lanes.
  """
  item = _itemsize(case.dtype)
  if case.op == "phase1":
    arrays = case.sources + case.queries
    if direction == "backward":
      arrays += case.sources
    total = arrays * item
  elif case.total_dtype is None:
    # K recent sources and the finished part; forward: one result.
    parts = case.sources + 1
    total = (2 * parts + 1 if direction == "backward" else parts + 1) * item
  else:
    wide = _itemsize(case.total_dtype)
    # Forward: sum, update, finished -> sum, normed. Backward: the sum and its
    # cotangent, finished and the cotangent of normed -> three cotangents, of
    # which two are one array if they have one dtype.
    total = 2 * wide + 3 * item
    if direction == "backward":
      total = 3 * wide + 3 * item + (item if wide != item else 0)
  return total * -(-case.width // 128) * 128


def _itemsize(dtype: str) -> int:
  return {"bfloat16": 2, "float32": 4}[dtype]


def step_bundles(path: pathlib.Path) -> int:
  """Bundles of one grid step from a kernel's `final_bundles.txt`.

  The body of a loop begins at an `LB`, and the number of `>` in front of a
  bundle is how many loops it is in; the outermost is the grid. Inner loops
  count as often as their exit test says.
  """
  bundle = re.compile(r"\s*0x[0-9a-f]+\s+((?:[A-Z]{2}\s*)*):?\s*(>*)\s*\{")
  exit_test = re.compile(r"s32\.totalorder %\S+, (\d+) /\* loop exit test")
  depths, starts, tests = [], [], {}
  for line in path.read_text().splitlines():
    found = bundle.match(line)
    if found:
      depth = len(found.group(2))
      if "LB" in found.group(1):
        starts.append((len(depths), depth))
      test = exit_test.search(line)
      if test:
        tests[len(depths)] = int(test.group(1))
      depths.append(depth)

  def end(first, last, depth):  # what comes behind a loop is merged into it
    return max(i for i in range(first, last) if depths[i] >= depth) + 1

  if any(depth > 2 for _, depth in starts):
    raise RuntimeError(f"{path.name}: expected loops in the grid, none in them")
  (grid,) = (i for i, depth in starts if depth == 1)
  total = end(grid, len(depths), 1) - grid
  inner = [i for i, depth in starts if depth == 2]
  for i, limit in zip(inner, [*inner[1:], len(depths)], strict=False):
    stop = end(i, limit, 2)
    trips = [n for at, n in tests.items() if i <= at < stop]
    if len(trips) != 1:
      raise RuntimeError(f"{path.name}: got exit tests {trips}, expected one")
    total += (stop - i) * (trips[0] - 1)
  return total


def hbm_bytes(hlo: str) -> int:
  """HBM traffic of a compiled TPU program: every operation's operands and
  results that lie in HBM, in whole tiles. The program has no loops.

  The compiler's own count has what it moves into VMEM ahead of a kernel twice.
  """
  entry = hlo[hlo.index("\nENTRY ") :]
  shapes, total = {}, 0
  free = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")
  for line in entry.splitlines()[1:]:
    found = re.match(r"\s*(?:ROOT )?(%\S+) = (\(.*?\)|\S+) ([a-z-]+)\(", line)
    if not found:
      continue
    name, result, operation = found.groups()
    arrays = re.findall(r"(\w+)\[([\d,]*)\]\{([^}]*)\}", result)
    shapes[name] = sum(_tiled_bytes(*x) for x in arrays)
    if operation in free or operation.endswith("-done"):
      continue
    if operation.endswith("-start"):  # a copy: source, target, token
      ends = arrays[:2]
      moved = min(_tiled_bytes(*x, anywhere=True) for x in ends)
      total += moved * sum(_tiled_bytes(*x) > 0 for x in ends)
      continue
    operands = set(re.findall(r"%[\w.-]+", line[found.end() :].split("), ")[0]))
    total += shapes[name] + sum(shapes.get(x, 0) for x in operands)
  return total


def _tiled_bytes(dtype: str, dims: str, layout: str, anywhere=False) -> int:
  """Bytes of an array in HBM with its tiles' padding; 0 if it is in VMEM."""
  if not anywhere and re.search(r"S\([1-9]\)", layout):
    return 0
  order, _, tiles = layout.partition(":")
  sizes = [int(x) for x in dims.split(",") if x]
  tile = re.match(r"T\(([\d,]+)\)", tiles)
  tile = [int(x) for x in tile.group(1).split(",")] if tile else []
  minor_first = [int(x) for x in order.split(",") if x]
  for axis, unit in zip(minor_first, reversed(tile), strict=False):
    sizes[axis] = -(-sizes[axis] // unit) * unit
  item = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}[dtype]
  return math.prod(sizes) * item


def compiler_version() -> str | None:
  """Version of libtpu; None if there is none."""
  folders = [pathlib.Path(sys.prefix) / "libtpu", *map(pathlib.Path, sys.path)]
  for folder in folders:
    for path in folder.glob("libtpu-*.dist-info"):
      return path.name.removeprefix("libtpu-").removesuffix(".dist-info")
  return None


def compiler_environment() -> dict[str, str]:
  """Environment of a process that compiles for TPUs on any machine.

  Raises:
    RuntimeError: no libtpu is installed.
  """
  library = os.environ.get("TPU_LIBRARY_PATH")
  if library is None:
    found = importlib.util.find_spec("libtpu")
    beside = pathlib.Path(sys.prefix) / "libtpu" / "libtpu"
    folder = pathlib.Path(found.origin).parent if found else beside
    library = str(folder / "libtpu.so")
  if not pathlib.Path(library).is_file():
    raise RuntimeError(
      f"no TPU compiler: got no file {library}, expected libtpu.so. `make env`"
      ' installs it; so does pip install "jax[tpu]". TPU_LIBRARY_PATH names'
      " another one."
    )
  return os.environ | {
    "TPU_LIBRARY_PATH": library,
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
  }


def tpu_mesh(topology: str):
  """A mesh of one device of a slice that is only compiled for.

  With `jax.set_mesh(mesh)` the kernels are traced for that device.
  """
  import jax
  from jax.experimental import topologies

  slice_ = topologies.get_topology_desc(topology_name=topology, platform="tpu")
  return jax.sharding.Mesh(
    slice_.devices[:1], ("x",), axis_types=(jax.sharding.AxisType.Auto,)
  )


def build(case: Case, implementation: str):
  """(function, its arguments' shapes and dtypes) of a case's forward."""
  import jax
  import jax.numpy as jnp

  from attnres_kernels.depth_attention import Attended, attend, merge

  def array(*shape, dtype=case.dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

  t, d = case.tokens, case.width
  if case.op == "phase1":

    def phase1(queries, *sources):
      return attend(queries, sources, eps=EPS, implementation=implementation)

    queries = array(case.queries, d, dtype="float32")
    return phase1, (queries, *[array(t, d)] * case.sources)

  def phase2(query, norm_scale, attended, recent, update):
    merged = merge(
      query, attended, recent, update, eps=EPS, norm_scale=norm_scale,
      norm_eps=EPS, total_dtype=case.total_dtype or jnp.float32,
      implementation=implementation,
    )  # fmt: skip
    return merged.normed, merged.total

  total = case.total_dtype
  scalar = array(t, dtype="float32")
  return phase2, (
    array(d, dtype="float32"),
    array(d, dtype="float32"),
    Attended(array(t, d), scalar, scalar),
    tuple([array(t, d, dtype=total or case.dtype)] * case.sources),
    array(t, d) if total else None,
  )


def _compile(case, implementation, mesh, direction):
  """The compiled program of one of DIRECTIONS."""
  import jax
  from jax.experimental.layout import Format, Layout

  function, arguments = build(case, implementation)
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def row_major(x):
    # As the rest of a model has it. Left alone, the compiler turns arguments
    # whose D is not a multiple of 128 around, and back for the kernel.
    return Format(Layout(tuple(range(x.ndim))), replicated)

  def forward_saving(*args):
    value, pull = jax.vjp(function, *args)
    # What is alive anyway is not moved to be saved.
    alive = {id(x) for x in jax.tree.leaves((args, value))}
    return value, [x for x in jax.tree.leaves(pull) if id(x) not in alive]

  def backward(pull, cotangents):
    return pull(cotangents)

  step = forward_saving if direction == "forward_saving" else function
  if direction == "backward":
    step = backward
    value, pull = jax.eval_shape(
      functools.partial(jax.vjp, function), *arguments
    )
    arguments = (pull, value)
  results = jax.eval_shape(step, *arguments)
  placed = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=row_major(x)),
    arguments,
  )
  jitted = jax.jit(step, out_shardings=jax.tree.map(row_major, results))
  return jitted.lower(*placed).compile()


def _plan(case, direction):
  """(tokens per grid step, VMEM bytes) of a kernel."""
  import jax.numpy as jnp

  from attnres_kernels.depth_attention import pallas_tpu_attend as phase1
  from attnres_kernels.depth_attention import pallas_tpu_merge as phase2
  from attnres_kernels.depth_attention.types import MergeOptions

  dtype = jnp.dtype(case.dtype)
  save = direction == "forward_saving"
  direction = direction.removesuffix("_saving")
  if case.op == "phase1":
    plan = phase1.plan(
      direction, case.sources, case.queries, case.width, dtype, case.tokens
    )
    return plan.tile, plan.vmem_bytes
  total = jnp.dtype(case.total_dtype or "float32")
  recent = total if case.total_dtype else dtype
  plan = phase2.merge_tile(
    phase2.Case(
      tokens=case.tokens,
      width=case.width,
      attended=dtype,
      recent=(recent,) * case.sources,
      update=dtype if case.total_dtype else None,
      norm_scale=True,
      options=MergeOptions(EPS, EPS, dtype, total, False),
    ),
    direction,
    save,
  )
  return plan.tile, plan.vmem_bytes


def _worker(chip: str, implementation: str, case: Case, plan: dict | None):
  """Compiles and prints the rows of `measure` as one line of JSON."""
  import jax

  from attnres_kernels.depth_attention import chips

  if plan is not None:
    chips.tuned = lambda key: plan
  mesh = tpu_mesh(CHIPS[chip].topology)
  jax.set_mesh(mesh)
  rows = []
  kernels = implementation == "pallas_tpu"
  for direction in DIRECTIONS if kernels else ("forward", "backward"):
    compiled = _compile(case, implementation, mesh, direction)
    if kernels:
      moved = hbm_bytes(compiled.as_text())
    else:
      moved = compiled.cost_analysis()["bytes accessed"]
    least = floor_bytes(case, direction) * case.tokens
    row = dict(
      chip=chip, op=case.op, direction=direction, model=case.model,
      R=case.sources, Q=case.queries, D=case.width, tokens=case.tokens,
      dtype=case.dtype, total_dtype=case.total_dtype,
      implementation=implementation, tile=None, bundles=None,
      floor_cycles=None, ratio=None, cycles=None,
      cycles_ratio=None,
      bytes_ratio=round(moved / least, 3), vmem_bytes=None,
      temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )  # fmt: skip
    if kernels:
      tile, vmem = _plan(case, direction)
      seconds = least / case.tokens * tile / CHIPS[chip].bandwidth
      floor = round(seconds * CHIPS[chip].clock)
      row |= dict(tile=tile, floor_cycles=floor, vmem_bytes=vmem)
    rows.append(row)
  print(json.dumps(rows))


if __name__ == "__main__":
  _chip, _implementation, _case, _plan_json = sys.argv[1:]
  _worker(
    _chip, _implementation, Case(*json.loads(_case)), json.loads(_plan_json)
  )
