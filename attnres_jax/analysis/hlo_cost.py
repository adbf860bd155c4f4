"""Bytes, FLOPs and collectives of a compiled program, loops included.

XLA's own `Compiled.cost_analysis()` counts the body of a loop once, which
leaves out most of a step with gradient accumulation or scanned depth; on a TPU
it also counts arrays that lie in VMEM as if they came from HBM. So the same
count is made here from the program's text, per instruction and times the
trips of the loops around it:

  flops      of dots and convolutions (2 per multiply-add), what Pallas kernels
             state as their cost, and the matrix products of splash attention,
             which states none. Elementwise arithmetic is not counted:
             it runs on the vector unit, beside the matrix units whose peak the
             FLOPs are held against.
  hbm_bytes  operands and results that lie in HBM, in whole tiles. A fusion
             that slices an operand reads the slice only, and one that updates
             a slice in place writes the slice only. What stays inside a fusion
             moves for nothing.
  payload    of a collective: the bytes of the whole array that it gathers,
             reduces, scatters or permutes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from attnres_jax.analysis.hlo import Array, Computation, Instruction, Program

# Of an asynchronous pair `-start`, `-done`, the start is what counts.
COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
  "ragged-all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip
_FREE = frozenset(
  (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
    "after-all", "opt-barrier", "optimization-barrier", "partition-id",
    "replica-id", "add-dependency", "domain", "iota",
  )
)  # fmt: skip
# Custom calls that move nothing: they name or allocate memory.
_FREE_TARGETS = frozenset(
  (
    "AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound",
    "GatherScatterIndicesBitpacked", "Sharding", "MoveToHost", "MoveToDevice",
  )
)  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")
_SAME_ELEMENTS = ("bitcast", "reshape", "transpose", "copy", "convert")


@dataclasses.dataclass(frozen=True)
class Collective:
  """Attributes:
  kind: of COLLECTIVES.
  payload: bytes on one device, see above.
  group: logical ids of the devices that exchange with the first one.
  """

  kind: str
  payload: int
  group: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Cost:
  """What one instruction does each time it runs.

  Attributes:
    instruction: itself.
    trips: how often it runs in one execution of the program.
    flops: see above.
    hbm_bytes: see above.
    copies: whether it is an asynchronous copy, which other work may hide.
    waits_for: names of the copies that have to be complete behind it.
    collectives: what it exchanges.
  """

  instruction: Instruction
  trips: int
  flops: float
  hbm_bytes: float
  copies: bool
  waits_for: tuple[str, ...]
  collectives: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True)
class Count:
  """Attributes:
  costs: every instruction that costs anything, in the order of the program.
  loops_counted_once: loops whose number of trips could not be told.
  """

  costs: list[Cost]
  loops_counted_once: int

  @property
  def flops(self) -> float:
    return sum(x.trips * x.flops for x in self.costs)

  @property
  def hbm_bytes(self) -> float:
    return sum(x.trips * x.hbm_bytes for x in self.costs)

  def collectives(self) -> dict[str, dict[str, int]]:
    """kind -> {"count", "bytes"}, with the trips."""
    found = {}
    for cost in self.costs:
      for one in cost.collectives:
        entry = found.setdefault(one.kind, dict(count=0, bytes=0))
        entry["count"] += cost.trips
        entry["bytes"] += cost.trips * one.payload
    return found


def count(program: Program) -> Count:
  """Walks a program from its entry."""
  counter = _Counter(program)
  costs = list(counter.walk(program.computations[program.entry], 1))
  return Count(costs, counter.loops_counted_once)


class _Counter:
  def __init__(self, program: Program):
    self.program = program
    self.loops_counted_once = 0
    self.chains = set()  # of collectives in several pieces, already counted

  def walk(self, computation: Computation, trips: int) -> Iterator[Cost]:
    for x in computation:
      if x.opcode == "while":
        times = self.program.trips(x)
        if times is None:
          self.loops_counted_once += 1
        for inner in self.program.called(x, "body"):
          yield from self.walk(inner, trips * (1 if times is None else times))
      elif x.opcode == "conditional":
        branches = [
          list(self.walk(inner, trips)) for inner in self.program.called(x)
        ]
        yield from max(
          branches, key=lambda costs: sum(c.hbm_bytes for c in costs)
        )
      elif x.opcode in ("call", "async-start"):
        for inner in self.program.called(x):
          yield from self.walk(inner, trips)
      else:
        cost = self.cost(computation, x, trips)
        if cost is not None:
          yield cost

  def cost(
    self, computation: Computation, x: Instruction, trips: int
  ) -> Cost | None:
    if x.opcode in ("copy-done", "slice-done"):
      return Cost(x, trips, 0, 0, False, x.operands, ())
    if (
      x.opcode in _FREE
      or x.opcode.endswith(("-done", "-update"))
      or x.attribute(r'custom_call_target="([^"]*)"') in _FREE_TARGETS
    ):
      return None
    copies = x.opcode in ("copy-start", "slice-start")
    if copies:  # source, target and a token: the smaller one is what moves
      ends = [a for a in x.arrays if a.dims][:2]
      moved = min(a.bytes for a in ends) if ends else 0
      hbm_bytes = moved * sum(a.in_hbm for a in ends)
    else:
      hbm_bytes = self.traffic(computation, x)
    return Cost(
      x, trips, self.flops(computation, x), hbm_bytes, copies, (),
      tuple(self.collectives(computation, x)),
    )  # fmt: skip

  def traffic(self, computation: Computation, x: Instruction) -> float:
    """HBM bytes that an instruction reads and writes."""
    operands = [
      computation.instructions[name]
      for name in x.operands
      if name in computation.instructions
    ]
    if x.opcode == "fusion":
      (inner,) = self.program.called(x, "calls")
      read = sum(
        self.part_read(inner, parameter) * _hbm(operand)
        for parameter, operand in zip(inner.parameters, operands, strict=True)
      )
      parts = self.parts_written(inner)
      if len(parts) != len(x.arrays):
        parts = [1.0] * len(x.arrays)
      return read + sum(
        part * array.hbm_bytes
        for part, array in zip(parts, x.arrays, strict=True)
      )
    written = _hbm(x)
    if x.opcode.startswith(COLLECTIVES) and len(operands) < len(x.arrays):
      written = sum(a.hbm_bytes for a in _results(x, operands))
    if x.opcode in _SLICES:
      return min(_hbm(operands[0]), _bytes(x)) + written
    if x.opcode == "dynamic-update-slice":
      update = operands[1]
      part = _bytes(update) if x.arrays[0].in_hbm else 0
      return _hbm(update) + part
    distinct = {operand.name: operand for operand in operands}
    return sum(map(_hbm, distinct.values())) + written

  def part_read(self, computation: Computation, name: str) -> float:
    """The part of an array's elements that its users read, 0 to 1."""
    whole = _elements(computation.instructions[name])
    if not whole:
      return 0.0
    part = 0.0
    for user in computation.users[name]:
      first = user.operands[0] == name
      if user.opcode in _SLICES and first:
        part += _elements(user) / whole
      elif user.opcode == "dynamic-update-slice" and first:
        continue  # updated in place
      elif user.opcode in _SAME_ELEMENTS:
        part += self.part_read(computation, user.name)
        part += user.name == computation.root
      elif user.opcode == "fusion":
        (inner,) = self.program.called(user, "calls")
        part += max(
          self.part_read(inner, parameter)
          for parameter, operand in zip(
            inner.parameters, user.operands, strict=True
          )
          if operand == name
        )
      else:
        part = 1.0
      if part >= 1:
        return 1.0
    return part

  def parts_written(self, computation: Computation) -> list[float]:
    """The part of each result's elements that a fusion writes."""
    root = computation.instructions[computation.root]
    names = root.operands if root.opcode == "tuple" else (root.name,)
    return [self.part_written(computation, name) for name in names]

  def part_written(self, computation: Computation, name: str) -> float:
    x = computation.instructions[name]
    while x.opcode in ("bitcast", "reshape") and x.operands:
      x = computation.instructions[x.operands[0]]
    if x.opcode == "dynamic-update-slice":
      update = computation.instructions[x.operands[1]]
      return _elements(update) / max(_elements(x), 1)
    if x.opcode == "fusion" and len(x.arrays) == 1:
      (inner,) = self.program.called(x, "calls")
      return self.part_written(inner, inner.root)
    return 1.0

  def flops(self, computation: Computation, x: Instruction) -> float:
    if x.opcode == "fusion":
      return sum(
        self.flops(inner, y)
        for inner in self.program.called(x, "calls")
        for y in inner
      )
    if x.opcode == "custom-call":
      stated = x.attribute(r'"cost_estimate":\{"flops":"(\d+)"')
      return float(stated) if stated else _splash_flops(computation, x)
    if x.opcode not in ("dot", "convolution"):
      return 0.0
    left, right = (
      computation.instructions[name].arrays[0].dims for name in x.operands[:2]
    )
    if x.opcode == "dot":
      axes = x.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
      contracted = math.prod(left[int(i)] for i in axes.split(",") if i)
      return 2.0 * math.prod(x.arrays[0].dims) * contracted
    return _convolution_flops(x, left, right)

  def collectives(
    self, computation: Computation, x: Instruction
  ) -> Iterator[Collective]:
    if x.opcode == "fusion":
      for inner in self.program.called(x, "calls"):
        for y in inner:
          yield from self.collectives(inner, y)
      return
    kind = x.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
      return
    # The TPU compiler spreads some over several fusions, its pieces.
    chain = x.attribute(r'chain_id="(\d+)"')
    if chain in self.chains:
      return
    if chain is not None:
      self.chains.add(chain)
    operands = [
      computation.instructions[name]
      for name in x.operands
      if name in computation.instructions
    ]
    sent = sum(map(_bytes, operands))
    received = sum(a.bytes for a in _results(x, operands))
    group = _group(x)
    if computation.name.startswith("%all-reduce-scatter"):
      kind = "reduce-scatter"  # written as an all-reduce, then a slice of it
    if kind == "reduce-scatter":
      payload = sent
    elif kind == "all-gather":
      payload = max(received, sent)
    else:
      payload = received if kind == "all-reduce" else sent
    yield Collective(kind, payload, group)


def _results(x: Instruction, operands: list[Instruction]) -> list[Array]:
  """A `-start` repeats its operands in its result, and adds tokens."""
  results = [a for a in x.arrays if a.dims or a.dtype not in ("u32", "s32")]
  if x.opcode.endswith("-start") and x.opcode != "all-reduce-start":
    results = results[sum(len(y.arrays) for y in operands) :]
  return results


def _group(x: Instruction) -> tuple[int, ...]:
  """The devices of the first of a collective's groups."""
  listed = x.attribute(r"replica_groups=\{\{([\d,]+)\}")
  if listed:
    return tuple(int(i) for i in listed.split(","))
  iota = re.search(
    r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?",
    x.attributes,
  )
  if iota:
    sizes = [int(i) for i in iota.group(3).split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    if iota.group(4):
      ids = ids.transpose([int(i) for i in iota.group(4).split(",")])
    return tuple(map(int, ids.reshape(-1, int(iota.group(2)))[0]))
  mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", x.attributes)
  if mesh:
    axes = re.findall(r"'([^']*)'=(\d+)", mesh.group(1))
    ids = np.arange(math.prod(int(n) for _, n in axes))
    ids = ids.reshape([int(n) for _, n in axes])
    used = set(re.findall(r"'([^']*)'", mesh.group(2)))
    index = tuple(slice(None) if name in used else 0 for name, _ in axes)
    return tuple(map(int, np.ravel(ids[index])))
  pairs = x.attribute(r"source_target_pairs=\{\{(\d+,\d+)\}")
  return tuple(int(i) for i in pairs.split(",")) if pairs else ()


def _splash_flops(computation: Computation, x: Instruction) -> float:
  """Of JAX's splash attention, which states no cost; 0 for any other kernel.

  Causal: of n x n blocks, n (n + 1) / 2 are computed.
  """
  kernel = re.search(r"splash_mha_(fwd|dkv|dq)", x.name)
  if not kernel:
    return 0.0
  operands = [computation.instructions[n].arrays[0] for n in x.operands]
  queries = next(
    a for a in operands if len(a.dims) == 4 and a.dtype in ("bf16", "f32")
  )
  blocks = next(a.dims[-1] for a in operands if a.dtype.startswith("s"))
  products = {"fwd": 2, "dkv": 4, "dq": 3}[kernel.group(1)]
  *_, tokens, _ = queries.dims
  pairs = tokens * queries.elements  # batch, heads, T, head dim; and T keys
  return products * 2.0 * pairs * (blocks + 1) / (2 * blocks)


def _convolution_flops(x: Instruction, left, right) -> float:
  """2 per multiply-add that does not fall on padding or a dilation's holes.

  The TPU compiler writes every matrix product as a convolution, batch
  dimensions as windows in which one position each counts.
  """
  labels = x.attribute(r"dim_labels=(\S+?)(?:,|$)")
  lhs, kernel, out = re.match(r"(\w+)_(\w+)->(\w+)", labels).groups()
  window = dict(
    re.findall(r"(\w+)=([\dx_\-]+)", x.attribute(r"window=\{([^}]*)\}") or "")
  )

  def option(key, axis, default):
    return window[key].split("x")[axis] if key in window else default

  positions = 1.0
  for axis in range(sum(c.isdigit() for c in lhs)):
    digit = str(axis)
    size = left[lhs.index(digit)]
    taps = right[kernel.index(digit)]
    outputs = x.arrays[0].dims[out.index(digit)]
    stride = int(option("stride", axis, 1))
    before = int(option("pad", axis, "0_0").split("_")[0])
    spread = int(option("lhs_dilate", axis, 1))
    apart = int(option("rhs_dilate", axis, 1))
    at = (
      np.arange(outputs)[:, None] * stride
      + np.arange(taps)[None] * apart
      - before
    )
    valid = (at >= 0) & (at % spread == 0) & (at // spread < size)
    positions *= valid.sum()
  batch = x.arrays[0].dims[out.index("b")]
  features = x.arrays[0].dims[out.index("f")]
  # With groups, the kernel's input features are those of one group.
  inputs = right[kernel.index("i")]
  batch_groups = int(x.attribute(r"batch_group_count=(\d+)") or 1)
  return 2.0 * positions * batch * features * inputs / batch_groups


def _bytes(x: Instruction) -> int:
  return sum(a.bytes for a in x.arrays)


def _hbm(x: Instruction) -> int:
  return sum(a.hbm_bytes for a in x.arrays)


def _elements(x: Instruction) -> int:
  return sum(a.elements for a in x.arrays)
