"""Which collectives a compiled program has, read off its HLO text."""

import math
import re
from typing import NamedTuple

KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)


class Collective(NamedTuple):
  """One collective in the text of a program.

  Attributes:
    kind: of KINDS.
    bytes: of the whole array on one device: what an all-gather returns, what a
      reduce-scatter is given, what the others return; all operands together.
    group: devices that take part in one of its groups; 1 where the text does
      not say.
    computation: name of the HLO computation that it stands in, so that whoever
      knows the trip counts of loops can multiply.
  """

  kind: str
  bytes: int
  group: int
  computation: str


class Total(NamedTuple):
  """Collectives of one kind: how many, and their `Collective.bytes` added."""

  count: int
  bytes: int


def collectives(hlo_text: str) -> dict[str, Total]:
  """The collectives of a program by kind; a loop's body counts once.

  Args:
    hlo_text: `jax.stages.Compiled.as_text()`, of any backend.
  """
  totals = {}
  for found in find(hlo_text):
    count, size = totals.get(found.kind, (0, 0))
    totals[found.kind] = Total(count + 1, size + found.bytes)
  return totals


def find(hlo_text: str) -> list[Collective]:
  """Every collective of a program, in the order of the text.

  An asynchronous one counts once, at its start. The TPU compiler may also
  spread one over several fusions, whose pieces carry the same chain id: they
  count once too. And it writes some reduce-scatters as a fusion of an
  all-reduce and a slice; they count as what they are.
  """
  found, chains, computation = [], set(), ""
  for line in hlo_text.splitlines():
    if header := _COMPUTATION.match(line):
      computation = header[1]
      continue
    match = _OPERATION.match(line)
    if not match:
      continue
    chain = _CHAIN.search(line)
    if chain and chain[1] in chains:
      continue
    if chain:
      chains.add(chain[1])
    result, kind, start = match.groups()
    shapes = [_bytes(*shape) for shape in _SHAPE.findall(result)]
    if start and kind != "all-reduce":
      # (operands, results, and for some a few scalars of context)
      operands = line[match.end() :].split(")")[0].count("%")
      shapes = shapes[operands : 2 * operands]
    size, group = sum(shapes), _group(line)
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
      kind = "reduce-scatter"
    elif kind == "reduce-scatter":
      size *= group
    found.append(Collective(kind, size, group, computation))
  return found


_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(
  rf"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\("
)
_CHAIN = re.compile(r'chain_id="(\d+)"')
_SHAPE = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")


def _bytes(dtype: str, dimensions: str) -> int:
  bits = 8 if dtype == "pred" else int(_BITS.search(dtype)[0])
  count = math.prod(int(size) for size in dimensions.split(",") if size)
  return -(-bits * count // 8)


def _group(line: str) -> int:
  if match := _IOTA.search(line):
    return int(match[1])
  match = _LISTED.search(line)
  return len(match[1].split(",")) if match else 1
