"""Where a result comes from: code, package versions and hardware."""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess

import jax

# What a result depends on; result files change while a table is made.
CODE = ("attnres_jax", "kernels", "configs", "scripts", "setup.py")
PACKAGES = (
  "attnres_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint",
  "grain", "numpy",
)  # fmt: skip


def commit() -> str:
  """The git commit, with `-dirty` if code differs from it; else "unknown"."""
  root = pathlib.Path(__file__).resolve().parents[1]
  head = _git(root, "rev-parse", "HEAD")
  if not head:
    return "unknown"
  changes = _git(root, "status", "--porcelain", "--", *CODE)
  return f"{head}-dirty" if changes else head


def code_hash() -> str:
  """Twelve hex digits of the code itself: also without git, also if changed."""
  root = pathlib.Path(__file__).resolve().parents[1]
  digest = hashlib.sha256()
  for name in CODE:
    path = root / name
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
      if file.is_file():
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(file.read_bytes())
  return digest.hexdigest()[:12]


def versions() -> dict[str, str | None]:
  """Versions of PACKAGES; None for one that is not installed."""
  found = dict.fromkeys(PACKAGES)
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def hardware() -> str:
  """Number and kind of devices; for CPU also its name and cores."""
  devices = jax.devices()
  kind = devices[0].device_kind
  if devices[0].platform != "cpu":
    return f"{len(devices)} x {kind}"
  if hasattr(os, "sched_getaffinity"):  # Linux: the cores that are ours
    cores = len(os.sched_getaffinity(0))
  else:
    cores = os.cpu_count()
  return f"CPU {_cpu_name()}, {cores} cores"


def _cpu_name() -> str:
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    for line in info.read_text().splitlines():
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  return platform.processor() or platform.machine()


def _git(root: pathlib.Path, *arguments: str) -> str | None:
  # Not a checkout of its own: git would answer for a repository around it.
  if not (root / ".git").exists():
    return None
  try:
    done = subprocess.run(
      ["git", *arguments], cwd=root, capture_output=True, text=True,
      timeout=20, check=True,
    )  # fmt: skip
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()
