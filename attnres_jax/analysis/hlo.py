"""The text of a compiled program (HLO) as instructions.

Only what costs are counted from: shapes with their layouts, operands, called
computations, trip counts of loops. `jax.stages.Compiled.as_text()` is the
program of one device, scheduled: its instructions run in this order.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# Bits of an element. `token` and other opaque types take no memory.
BITS = {
  "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16,
  "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64, "bf16": 16, "f16": 16,
  "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_NAME = re.compile(r"%[\w.\-]+")
_HEAD = re.compile(r"\s*(?:ROOT )?(%[\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(
  r"\b(calls|to_apply|body|condition|branch_computations|called_computations|"
  r"true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Array:
  """An array of a result.

  Attributes:
    dtype: HLO's name, e.g. bf16.
    dims: sizes.
    bytes: with the padding of its tiles.
    in_hbm: whether it lies in HBM; a TPU program also places arrays in VMEM.
  """

  dtype: str
  dims: tuple[int, ...]
  bytes: int
  in_hbm: bool

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def hbm_bytes(self) -> int:
    return self.bytes if self.in_hbm else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: with its percent sign.
    opcode: e.g. fusion.
    arrays: of its result, a nested tuple flattened.
    operands: names.
    attributes: the text behind the operands.
    called: names of called computations by attribute, e.g. {"body": [..]}.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  attributes: str
  called: dict[str, list[str]]

  def attribute(self, pattern: str) -> str | None:
    """The first group of a regular expression in the attributes."""
    found = re.search(pattern, self.attributes)
    return found.group(1) if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
  """Attributes: instructions by name, in their order; the root's name."""

  name: str
  instructions: dict[str, Instruction]
  root: str

  def __iter__(self) -> Iterator[Instruction]:
    return iter(self.instructions.values())

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    found = {name: [] for name in self.instructions}
    for instruction in self:
      for name in dict.fromkeys(instruction.operands):
        if name in found:
          found[name].append(instruction)
    return found

  @functools.cached_property
  def parameters(self) -> list[str]:
    """Names, by number."""
    named = [x for x in self if x.opcode == "parameter"]
    return [x.name for x in sorted(named, key=lambda x: int(x.attributes))]


@dataclasses.dataclass(frozen=True)
class Program:
  """Attributes: computations by name; the name of the one that runs."""

  computations: dict[str, Computation]
  entry: str

  def called(self, instruction: Instruction, *keys: str) -> list[Computation]:
    """The computations behind the given attributes; all without keys."""
    keys = keys or tuple(instruction.called)
    return [
      self.computations[name]
      for key in keys
      for name in instruction.called.get(key, ())
      if name in self.computations
    ]

  def trips(self, loop: Instruction) -> int | None:
    """How often a `while` runs its body; None: it cannot be told.

    A loop of `jax.lax.scan` counts from 0 to the constant of its condition.
    """
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
      return int(known)
    (condition,) = self.called(loop, "condition")
    limits = []
    for computation in (condition, *self._inside(condition)):
      limits += [
        int(x.attributes)
        for x in computation
        if x.opcode == "constant" and re.fullmatch(r"\d+", x.attributes)
      ]
    limits = [n for n in limits if n]
    return limits[0] if len(limits) == 1 else None

  def _inside(self, computation: Computation) -> Iterator[Computation]:
    for instruction in computation:
      for inner in self.called(instruction):
        yield inner
        yield from self._inside(inner)


def parse(text: str) -> Program:
  """Reads `Compiled.as_text()`.

  Raises:
    ValueError: the text has no entry computation.
  """
  computations, entry = {}, None
  name, lines = None, []
  for line in text.splitlines():
    if name is None:
      head = _COMPUTATION.match(line)
      if head:
        name, lines = head.group(2), []
        entry = name if head.group(1) else entry
    elif line.rstrip() == "}":
      computations[name] = _computation(name, lines)
      name = None
    elif _HEAD.match(line):
      lines.append(line)
    else:  # a kernel's metadata may have line breaks
      lines[-1] += line
  if entry is None:
    raise ValueError("got a text without an ENTRY: expected a compiled program")
  return Program(computations, entry)


def arrays(text: str) -> tuple[Array, ...]:
  """The arrays of a shape; a tuple is flattened."""
  return tuple(_array(*found) for found in _ARRAY.findall(text))


@functools.lru_cache(maxsize=65536)
def _array(dtype: str, dims: str, layout: str) -> Array:
  sizes = [int(x) for x in dims.split(",") if x]
  padded = list(sizes)
  order, _, rest = layout.partition(":")
  tile = _TILE.match(rest)
  units = [int(x) for x in tile.group(1).split(",")] if tile else []
  minor_first = [int(x) for x in order.split(",") if x]
  for axis, unit in zip(minor_first, reversed(units), strict=False):
    padded[axis] = -(-padded[axis] // unit) * unit
  return Array(
    dtype,
    tuple(sizes),
    -(-math.prod(padded) * BITS.get(dtype, 0) // 8),
    not re.search(r"S\([1-9]\)", layout),
  )


def _computation(name: str, lines: list[str]) -> Computation:
  instructions, root = {}, None
  for line in lines:
    found = _HEAD.match(line)
    instruction = _instruction(found.group(1), line[found.end() :])
    instructions[instruction.name] = instruction
    if line.lstrip().startswith("ROOT "):
      root = instruction.name
  return Computation(name, instructions, root)


def _instruction(name: str, text: str) -> Instruction:
  end = _closing(text, 0) if text.startswith("(") else text.index(" ")
  shape, rest = text[:end], text[end:]
  opcode = _OPCODE.match(rest)
  start = opcode.end() - 1
  stop = _closing(rest, start)
  inside, attributes = rest[start + 1 : stop - 1], rest[stop:].lstrip(", ")
  opcode = opcode.group(1)
  if opcode in ("parameter", "constant"):
    attributes = inside  # its number; its value
  called = {
    key: _NAME.findall(names) for key, names in _CALLED.findall(attributes)
  }
  operands = tuple(_NAME.findall(inside))
  return Instruction(name, opcode, arrays(shape), operands, attributes, called)


def _closing(text: str, start: int) -> int:
  """Behind the bracket that closes the one at `start`."""
  depth = 0
  for position in range(start, len(text)):
    if text[position] == "(":
      depth += 1
    elif text[position] == ")":
      depth -= 1
      if not depth:
        return position + 1
  raise ValueError(f"got no closing bracket in {text[start : start + 80]!r}")
