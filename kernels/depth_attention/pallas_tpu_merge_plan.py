"""What the kernels of phase 2 read and write, in which tiles, at what cost."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attnres_kernels.depth_attention import chips
from attnres_kernels.depth_attention import pallas_tpu_merge_kernel as kernel
from attnres_kernels.depth_attention.types import MergeOptions

F32 = jnp.dtype(jnp.float32)
# Tokens of a grid step. A bfloat16 register holds 16 rows.
TILES = (1024, 512, 256, 128, 64, 32, 16)
# With this many bytes a step is long against its fixed cost (about 0.35 us),
# and a larger tile only lengthens the first read and the last write, which
# nothing hides.
STEP_BYTES = 8 << 20
# Elements of a D-array that a group of rows covers: enough work to fill the
# waits for sums along D, little enough unrolled code to compile in seconds.
GROUP_ELEMENTS = 1 << 18
MAX_GROUP = 128


class Case(NamedTuple):
  """What is static in a call of `merge`.

  Attributes:
    tokens: product of the leading axes.
    width: D.
    attended: dtype of attended.out; None: absent.
    recent: dtype of each recent source.
    update: its dtype; None: absent.
    norm_scale: whether there is one.
    options: as given to `merge`.
  """

  tokens: int
  width: int
  attended: jnp.dtype | None
  recent: tuple[jnp.dtype, ...]
  update: jnp.dtype | None
  norm_scale: bool
  options: MergeOptions

  @property
  def sources(self) -> tuple[jnp.dtype, ...]:
    """Dtypes of the recent sources that the mixture is made of."""
    if self.update is None:
      return self.recent
    return *self.recent[:-1], self.options.total_dtype

  @property
  def weighted(self) -> bool:
    """Whether there is more than one source."""
    return len(self.recent) + (self.attended is not None) > 1

  @property
  def saved(self) -> tuple[str, ...]:
    """What the forward saves per token, in the order of the rows."""
    recent = range(len(self.recent))
    norm = self.options.norm_eps is not None
    names = []
    if self.weighted:
      names += [f"logit{k}" for k in recent]
    if self.weighted and self.options.key_eps is not None:
      names += [f"inverse{k}" for k in recent]
    if norm:
      names += ["scale"]
    if self.weighted and norm:
      names += [
        f"dot{i}" for i in range(len(recent) + (self.attended is not None))
      ]
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class Buffer:
  """An operand or a result of a kernel.

  Attributes:
    kind: "tokens" [tokens, D]; "vector" [1, D]; "lanes" [tiles, rows, tile],
      numbers per token; "sums" [parts, rows, D], sums over a part's tokens.
    dtype: of its elements.
    rows: see kind.
  """

  kind: str
  dtype: jnp.dtype = F32
  rows: int = 1


def buffers(case: Case, direction: str, save: bool = True):
  """Operands and results of a kernel, two trees of Buffer.

  Args:
    case: the call.
    direction: "forward" or "backward".
    save: whether the forward saves what the backward needs.
  """
  options = case.options
  attended, norm = case.attended is not None, options.norm_eps is not None
  tokens = functools.partial(Buffer, "tokens")

  ins = {"query": Buffer("vector")}
  if norm and case.norm_scale:
    ins["norm_scale"] = Buffer("vector")
  if attended:
    ins["out"] = tokens(case.attended)
  if attended and case.weighted:
    ins |= {"max": Buffer("lanes"), "sum": Buffer("lanes")}
  saved = {}
  if case.saved:
    saved["saved"] = Buffer("lanes", rows=len(case.saved))

  if direction == "forward":
    ins["recent"] = tuple(tokens(d) for d in case.recent)
    outs = {"normed": tokens(options.dtype)}
    if case.update is not None:
      ins["update"] = tokens(case.update)
      outs["total"] = tokens(options.total_dtype)
    if options.return_merged and norm:
      outs["merged"] = tokens(options.dtype)
    return ins, outs | (saved if save else {})

  ins |= {"recent": tuple(tokens(d) for d in case.sources), **saved}
  ins["d_normed"] = tokens(options.dtype)
  outs = {"d_recent": tuple(tokens(d) for d in case.recent)}
  if case.update is not None:
    ins["d_total"] = tokens(options.total_dtype)
    if case.update != case.recent[-1]:
      outs["d_update"] = tokens(case.update)
  if options.return_merged:
    ins["d_merged"] = tokens(options.dtype)
  if attended:
    outs["d_out"] = tokens(case.attended)
  if attended and case.weighted:
    outs["d_sum"] = Buffer("lanes")
  if case.weighted:
    outs["d_query"] = Buffer("sums", rows=kernel.SUBLANES)
  if "norm_scale" in ins:
    outs["d_norm_scale"] = Buffer("sums", rows=kernel.SUBLANES)
  return ins, outs


class Plan(NamedTuple):
  """How a case is cut, and what that costs.

  Attributes:
    tile: tokens of a grid step.
    rows: tokens of a group; the kernel's loop makes tile / rows trips.
    tiles: number of tiles.
    parts: cores that share them.
    steps: grid steps of a core.
    padded: D in whole vectors.
    vmem_bytes: of blocks and scratch, double buffering included.
    step_bytes: HBM bytes of a grid step: every block that changes from step to
      step, with the padding of lanes and sublanes that HBM holds.
    array_bytes: of these the [tokens, D] arrays alone.
    floor_bytes: array_bytes without padding, which is there unless D is a
      multiple of 128: a property of the arrays, not of the kernel.
  """

  tile: int
  rows: int
  tiles: int
  parts: int
  steps: int
  padded: int
  vmem_bytes: int
  step_bytes: int
  array_bytes: int
  floor_bytes: int


def merge_tile(case: Case, direction: str, save: bool = True) -> Plan:
  """Chooses the tile; arguments as for `buffers`.

  Raises:
    ValueError: not even the smallest tile fits into VMEM.
  """
  budget, cores = chips.vmem_budget(), chips.info().num_cores
  # No larger than what gives every core a tile.
  limit = pl.next_power_of_2(max(pl.cdiv(case.tokens, cores), TILES[-1]))
  plans = [
    _plan(case, direction, save, tile, cores) for tile in TILES if tile <= limit
  ]
  fitting = [plan for plan in plans if plan.vmem_bytes <= budget]
  if not fitting:
    raise ValueError(
      f"merge, {direction}: got D={case.width} and {len(case.recent)} recent"
      f" sources, of which {TILES[-1]} tokens take {plans[-1].vmem_bytes} bytes"
      f" of VMEM: expected at most {budget} (chips.vmem_budget()). Take fewer"
      ' recent sources, a smaller D, or implementation="xla".'
    )
  tuned = chips.tuned_tile(tuned_key(case, direction))
  for plan in fitting:
    if tuned is not None and plan.tile <= tuned:
      return plan
    # Below 128 tokens the numbers per token waste lanes.
    small = plan.step_bytes <= STEP_BYTES or plan.tile <= kernel.LANES
    if tuned is None and small:
      return plan
  return fitting[-1]


def tuned_key(case: Case, direction: str) -> str:
  """The key of the tile in tuned/<chip>.json."""
  dtypes = "+".join(str(d) for d in case.sources)
  return f"merge_{direction}:D={case.width}:{dtypes}"


def _plan(case, direction, save, tile, cores):
  padded = pl.cdiv(case.width, kernel.LANES) * kernel.LANES
  rows = min(MAX_GROUP, tile)
  while rows > TILES[-1] and rows * padded > GROUP_ELEMENTS:
    rows //= 2
  vmem = step = arrays = 0
  for b in jax.tree.leaves(buffers(case, direction, save)):
    if b.kind == "tokens":
      # A tile of an array of D per token.
      size = tile * padded * b.dtype.itemsize
      arrays += size
      step += size
    elif b.kind == "lanes":
      # A number per token and row; lanes padded to 128.
      lanes = max(tile, kernel.LANES)
      size = _sublanes(b.rows) * lanes * b.dtype.itemsize
      step += size
    else:
      # A vector of D, or 8 rows of a sum over tokens.
      size = _sublanes(b.rows) * padded * b.dtype.itemsize
    # Two of each: the pipeline moves one while the body works on the other.
    vmem += 2 * size
  if has_scratch(case, direction):
    # The mixture of a group, kept from its sum of squares to its norm.
    vmem += rows * padded * F32.itemsize
  tiles = pl.cdiv(case.tokens, tile)
  steps = pl.cdiv(tiles, min(cores, tiles))
  return Plan(
    tile=tile,
    rows=rows,
    tiles=tiles,
    parts=pl.cdiv(tiles, steps),
    steps=steps,
    padded=padded,
    vmem_bytes=vmem,
    step_bytes=step,
    array_bytes=arrays,
    floor_bytes=arrays // padded * case.width,
  )


def has_scratch(case: Case, direction: str) -> bool:
  return direction == "forward" and case.options.norm_eps is not None


def _sublanes(rows):
  """Rows as padded in memory, float32: 1, 2, 4 or a multiple of 8."""
  if rows < kernel.SUBLANES:
    return pl.next_power_of_2(rows)
  return pl.cdiv(rows, kernel.SUBLANES) * kernel.SUBLANES
