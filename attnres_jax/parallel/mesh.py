"""The mesh of a config: how many devices along each axis, and which ones."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from ml_collections import ConfigDict

from attnres_jax.errors import UserError
from attnres_jax.parallel.rules import AXES, BATCH, check_divides


def make_mesh(
  config: ConfigDict, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """The mesh of a config, with the axes of parallel/rules.py.

  Neighbours along `tensor` are neighbours in the network, and slices are along
  `data`.

  Args:
    config: of configs/train.py.
    devices: to take them from, which need not be here; None: those here.

  Raises:
    UserError: the mesh does not fill the devices, or it does not divide the
      batch, the sequence or the model.
  """
  processes = jax.process_count() if devices is None else 1
  devices = jax.devices() if devices is None else list(devices)
  sizes = _sizes(config, len(devices), devices[0].platform)
  total = math.prod(sizes.values())
  if processes > 1 and total != len(devices):
    raise UserError(
      f"got {_product(sizes)} = {total} devices: expected all {len(devices)}"
      f" when {processes} processes train together. Set it with"
      " --config.mesh.data=-1."
    )
  check_divides(config, sizes)
  mesh = Mesh(
    _arrange(sizes, devices[:total]), AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
  )  # fmt: skip
  if processes > 1:
    _check_whole_rows(config, mesh, processes)
  return mesh


def _sizes(config, available: int, platform: str) -> dict[str, int]:
  """Devices along every axis, with the -1 filled in."""
  sizes = {axis: config.mesh[axis] for axis in AXES}
  for axis, size in sizes.items():
    if size != -1 and not 1 <= size <= available:
      raise UserError(
        f"got mesh.{axis} {size}: expected -1 (the rest) or 1 to {available},"
        f" the {platform} devices. Set it with --config.mesh.{axis}."
      )
  rest = [axis for axis, size in sizes.items() if size == -1]
  if len(rest) > 1:
    raise UserError(
      f"got mesh.{' and mesh.'.join(rest)} -1: expected one axis at most to"
      f" take the rest. Set one with --config.mesh.{rest[-1]}."
    )
  fixed = {axis: size for axis, size in sizes.items() if size != -1}
  total = math.prod(fixed.values())
  if total > available or (rest and available % total):
    expected = f"a divisor of {available}" if rest else f"at most {available}"
    raise UserError(
      f"got {_product(fixed)} = {total} devices: expected {expected}, the"
      f" {platform} devices. Set them with"
      f" {', '.join(f'--config.mesh.{axis}' for axis in fixed)}."
    )
  return {axis: available // total if axis in rest else size
          for axis, size in sizes.items()}  # fmt: skip


def _product(sizes) -> str:
  """ "mesh.data 2 x mesh.seq 4", without the ones."""
  parts = [f"mesh.{axis} {size}" for axis, size in sizes.items() if size > 1]
  return " x ".join(parts) or "one device"


def _arrange(sizes, devices) -> np.ndarray:
  """The devices as an array with the axes of AXES."""
  shape = tuple(sizes.values())
  # Only devices of a job of several slices have the attribute.
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  if slices == 1:
    return mesh_utils.create_device_mesh(
      shape, devices, allow_split_physical_axes=True
    )
  if sizes["data"] % slices:
    raise UserError(
      f"got mesh.data {sizes['data']}: expected a multiple of {slices}, the"
      " slices, which are along data. Set it with --config.mesh.data."
    )
  inside = (sizes["data"] // slices, *shape[1:])
  across = (slices, *[1] * (len(shape) - 1))
  return mesh_utils.create_hybrid_device_mesh(
    inside, across, devices, allow_split_physical_axes=True
  )


def _check_whole_rows(config, mesh, processes) -> None:
  """Every process loads rows of its own, and whole ones."""
  shape = (config.data.batch_size, config.data.seq_len)
  indices = NamedSharding(mesh, BATCH).devices_indices_map(shape)
  rows = [set() for _ in range(processes)]
  for device, (index, _) in indices.items():
    rows[device.process_index].update(range(*index.indices(shape[0])))
  if sum(map(len, rows)) > shape[0]:
    inner = mesh.shape["seq"] * mesh.shape["tensor"]
    raise UserError(
      f"got mesh.seq x mesh.tensor = {inner} devices, which share sequences but"
      " not a process: expected them to be within one process, since every"
      f" process ({mesh.devices.size // processes} devices) loads sequences of"
      " its own. Set --config.mesh.seq, --config.mesh.tensor or"
      " --config.mesh.fsdp."
    )
