"""Whether a compiled program fits into a device's memory, and why not."""

import math
import re

from ml_collections import ConfigDict


def memory(compiled) -> dict[str, int]:
  """Bytes per device of a `jax.stages.Compiled`, by what they hold."""
  stats = compiled.memory_analysis()
  sizes = dict(
    argument_bytes=stats.argument_size_in_bytes,
    temp_bytes=stats.temp_size_in_bytes,
    output_bytes=stats.output_size_in_bytes,
    alias_bytes=stats.alias_size_in_bytes,
  )
  peak = sum(sizes.values()) - 2 * sizes["alias_bytes"]
  return sizes | dict(peak_bytes=peak)


def refused(error: str, row: dict, config: ConfigDict) -> str:
  """Why the compiler gave up: it names sizes, and does not always name all."""
  said = " ".join(error.split()).partition("RESOURCE_EXHAUSTED: ")[2]
  used = re.search(r"temporaries \(([\d.]+)([KMGT]?)\)", said) or re.search(
    r"Used ([\d.]+)([KMGT]?) of", said
  )
  if not used:
    return f"the compiler says: {said[:600]} {_knobs(config)}"
  scale = 1024 ** " KMGT".index(used.group(2) or " ")
  temporary = "temporaries" in used.group(0)
  held = row["parameter_bytes"] + row["optimizer_bytes"]
  row["temp_bytes"] = round(float(used.group(1)) * scale) if temporary else None
  needed = float(used.group(1)) * scale + (held if temporary else 0)
  largest = re.findall(
    r"Size: (\S+) .*?op_name=\"([^\"]*)\".*?Shape: (\S+)", said
  )
  buffers = "".join(
    f" {size} {shape} of {operation};" for size, operation, shape in largest[:3]
  )
  return explain(needed, row, config) + (
    f" Largest buffers:{buffers}" if buffers else ""
  )


def explain(needed: float, row: dict, config: ConfigDict) -> str:
  limit = row["hbm_limit_bytes"]
  temporary = row["temp_bytes"]
  parts = [
    f"parameters {_gib(row['parameter_bytes'])}",
    f"optimizer state {_gib(row['optimizer_bytes'])}",
  ]
  if temporary is not None:
    parts.append(f"temporaries {_gib(temporary)}")
  return (
    f"{_gib(needed - limit)} ({round(needed - limit):,} bytes) too much: got"
    f" {_gib(needed)} per device ({', '.join(parts)}), expected at most"
    f" {_gib(limit)}. {_knobs(config)}"
  )


def _knobs(config: ConfigDict) -> str:
  axes = [axis for axis in ("fsdp", "tensor", "seq") if axis in config.mesh]
  knobs = ["a larger --config.opt.accumulate"]
  if config.model.remat != "block":
    knobs.append("--config.model.remat=block")
  knobs += [f"a larger {axis} in --mesh" for axis in axes]
  knobs.append("a smaller --config.data.batch_size")
  return f"Set {', '.join(knobs[:-1])} or {knobs[-1]}."


def shard_bytes(tree) -> int:
  """Bytes of abstract arrays on one device."""
  import jax

  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _gib(size: float) -> str:
  return f"{size / 2**30:.2f} GiB"
