"""Shared set-up: CPU only, absl flags parsed, compiled programs kept."""

import os
import pathlib
import signal
import subprocess
import sys

# Before jax is imported. One device: the suite is about numbers, and eight
# devices on two cores make every compilation partition for nothing. Tests of
# sharding ask for devices in a process of their own (`run_python`).
os.environ["JAX_PLATFORMS"] = "cpu"
# A test session leaves no files outside its own folders.
os.environ.setdefault("MPLBACKEND", "agg")

import jax
import pytest
from absl import flags

REPO = pathlib.Path(__file__).resolve().parent.parent


def pytest_configure(config):
  del config
  # A suite started in the background inherits that Ctrl-C is ignored.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  # grain's worker processes read absl flags, which pytest never parses.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["pytest"])
  # Shared by the test processes and by the next session.
  jax.config.update("jax_compilation_cache_dir", str(REPO / ".cache" / "jax"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture
def run_python():
  """Runs code in a new process that has `devices` CPU devices.

  Returns:
    run(code, devices=8) -> standard output; a failing process fails the test
    with what it wrote to standard error. Warnings are errors there too.
  """

  def run(code: str, devices: int = 8) -> str:
    prelude = (
      "import jax\n"
      "jax.config.update('jax_platforms', 'cpu')\n"
      f"jax.config.update('jax_num_cpu_devices', {devices})\n"
    )
    done = subprocess.run(
      [
        *(sys.executable, "-W", "error"),
        # ml_collections 1.1 loads config files this way.
        *("-W", "ignore:the load_module() method is deprecated"),
        *("-c", prelude + code),
      ],
      cwd=REPO,
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout

  return run
