"""How long a compiled program would take on a chip, by its roofline.

A model, not a measurement: one instruction after the other, each as long as
its matrix products at the published peak or its HBM traffic at the published
bandwidth, whichever is longer, and behind them the collectives at the
bandwidth of the links. An asynchronous copy (a prefetch into VMEM) moves while
instructions leave HBM idle, and what waits for it waits for the rest of it.

Not in it: arithmetic of the vector unit, the latency of anything, collectives
that run beside computation, HBM that two things fight over, the host.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from attnres_jax.analysis.hlo_cost import Collective, Cost, Count


class Chip(NamedTuple):
  """Published figures of a TPU chip (Google Cloud's documentation).

  Attributes:
    flops: peak of bfloat16 matrix products, per second.
    bandwidth: HBM bytes per second.
    hbm: bytes of HBM.
    ici: bytes per second that a chip sends over all its links.
    axes: of the torus of links; a chip has two links along each.
    pod: most chips that one slice can have.
    examples: shapes of slices that exist.
  """

  flops: float
  bandwidth: float
  hbm: int
  ici: float
  axes: int
  pod: int
  examples: tuple[str, ...]


_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "8x8x8")
GIB = 2**30
CHIPS = {
  "v4": Chip(275e12, 1228e9, 32 * GIB, 300e9, 3, 4096, _CUBES),
  "v5e": Chip(197e12, 819e9, 16 * GIB, 200e9, 2, 256, _FLAT),
  "v5p": Chip(459e12, 2765e9, 96 * GIB, 600e9, 3, 8960, _CUBES),
  "v6e": Chip(918e12, 1640e9, 32 * GIB, 400e9, 2, 256, _FLAT),
}

# What the compiler keeps free for the runtime, as it says when it runs out.
RESERVED = 258 * 2**20


class Part(NamedTuple):
  """An instruction's share of the step.

  Attributes:
    cost: of the instruction.
    seconds: over all its trips.
    bound: flops | hbm | ici | copy.
  """

  cost: Cost
  seconds: float
  bound: str


@dataclasses.dataclass(frozen=True)
class Model:
  """Attributes:
  parts: of every instruction that takes time.
  bound_s: the least that any schedule could take: all FLOPs at the peak or
    all HBM traffic at the bandwidth, whichever is longer.
  """

  parts: list[Part]
  bound_s: float

  @property
  def seconds(self) -> float:
    return sum(part.seconds for part in self.parts)

  def by_bound(self) -> dict[str, float]:
    """Seconds by what limits them."""
    totals = dict.fromkeys(("flops", "hbm", "ici", "copy"), 0.0)
    for part in self.parts:
      totals[part.bound] += part.seconds
    return totals


def model(
  count: Count,
  chip: Chip,
  axes_spanned: Callable[[Sequence[int]], int],
  cores: int = 1,
) -> Model:
  """Models one execution of a program on one device.

  Args:
    count: of the program.
    chip: that it was compiled for.
    axes_spanned: logical ids of devices -> torus axes that they differ in.
    cores: devices per chip; they share its figures.
  """
  peak, bandwidth = chip.flops / cores, chip.bandwidth / cores
  parts, pending = [], {}  # copies under way: name -> seconds left
  for cost in count.costs:
    name = cost.instruction.name
    if cost.copies:
      pending[name] = cost.hbm_bytes / bandwidth
      continue
    if cost.waits_for:
      # In the order in which they were started: one queue.
      seconds = 0.0
      for other in list(pending):
        seconds += pending.pop(other)
        if other in cost.waits_for:
          break
      if seconds:
        parts.append(Part(cost, cost.trips * seconds, "copy"))
      continue
    compute, memory = cost.flops / peak, cost.hbm_bytes / bandwidth
    idle = max(0.0, compute - memory)
    for other in list(pending):
      done = min(idle, pending[other])
      idle -= done
      pending[other] -= done
    seconds, bound = max((compute, "flops"), (memory, "hbm"))
    links = sum(
      collective_seconds(x, chip, axes_spanned(x.group)) * cores
      for x in cost.collectives
    )
    if links > seconds:
      seconds, bound = links, "ici"
    if seconds:
      parts.append(Part(cost, cost.trips * seconds, bound))
  return Model(parts, max(count.flops / peak, count.hbm_bytes / bandwidth))


def collective_seconds(x: Collective, chip: Chip, axes: int) -> float:
  """A bandwidth-optimal ring in both directions over the axes it can use.

  Of n devices each, an all-gather, a reduce-scatter and an all-to-all send
  (n - 1) / n of the whole array from every chip, an all-reduce twice that, and
  a permutation all of it. An all-to-all is no ring; it takes longer.
  """
  n = len(x.group)
  if n < 2:
    return 0.0
  sent = x.payload * (n - 1) / n
  if x.kind == "all-reduce":
    sent *= 2
  elif x.kind in ("collective-permute", "collective-broadcast"):
    sent = x.payload
  return sent / (chip.ici * max(axes, 1) / chip.axes)
