"""The TPU that a kernel is traced for: its facts, budgets and tuned tiles."""

import contextlib
import contextvars
import functools
import importlib.resources
import json

import jax
from jax.experimental.pallas import tpu as pltpu

# Of a core's VMEM: the rest is left to the compiler's own scratch.
VMEM_SHARE = 0.85

_interpret = contextvars.ContextVar("interpret", default=False)


@contextlib.contextmanager
def interpreted(mode=True):
  """Kernels traced inside run on the CPU: True, or pltpu.InterpretParams."""
  token = _interpret.set(mode)
  try:
    yield
  finally:
    _interpret.reset(token)


def interpret_mode():
  """What `pallas_call(interpret=)` gets."""
  return _interpret.get()


def device_kind() -> str | None:
  """The TPU that tracing is for, like "TPU v5 lite"; None: not a TPU.

  It is the device of the mesh in use (`jax.set_mesh`), which may be of a
  topology that is only compiled for, or else the default device.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None:
    device = jax.devices()[0]
  return device.device_kind if device.platform == "tpu" else None


def info() -> pltpu.TpuInfo:
  """Facts of that TPU; of a TPU v5p where there is none (interpret mode)."""
  if device_kind() is None:
    return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5P, 1)
  return pltpu.get_tpu_info()


def vmem_budget() -> int:
  """Bytes of VMEM that a kernel may plan with."""
  return int(VMEM_SHARE * info().vmem_capacity_bytes)


@functools.cache
def _tuned(chip: str) -> dict:
  path = importlib.resources.files(__package__) / "tuned" / f"{chip}.json"
  return json.loads(path.read_text()) if path.is_file() else {}


def tuned(key: str) -> dict:
  """The entry of a kernel and shape in tuned/<chip>.json; {}: not tuned."""
  return _tuned(info().chip_version.value).get(key, {})


def tuned_tile(key: str) -> int | None:
  """Its tokens per grid step, if they are given."""
  return tuned(key).get("tile")
