"""The folder of a run: whose it is, what it was made with, how it ended.

config.json        the whole config; a run of another one is refused
environment.json   commit, versions, devices of the latest session
metrics.jsonl      see metrics.py
profile/           traces, see profiling.py
tensorboard/       the same values as event files
checkpoints/       see checkpoint.py
summary.json       once the run is finished
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import platform
import time
import uuid
from collections.abc import Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from attnres_jax import provenance
from attnres_jax.errors import UserError
from attnres_jax.parallel.distributed import from_first, together
from attnres_jax.train.files import write_atomically

# A run may continue with other values of these. The first group changes what
# is shown or kept. The second changes on which devices and in what order the
# same numbers are computed: a run can move to other hardware, and goes on as
# before up to rounding.
HARMLESS = (
  "run.log_every",
  "run.eval_every",
  "run.checkpoint_every",
  "run.keep_checkpoints",
  "run.tensorboard",
  "run.progress",
  "run.profile_start",
  "run.profile_steps",
  "data.prefetch",
  "mesh.",  # all of that group
  "opt.accumulate",
  "model.remat",
  "mixer.implementation",
)
# Seconds until all hosts must see a file that the first one wrote: network
# file systems look at a folder again that late.
SHARED_S = 60


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
  """{"a": {"b": 1}} -> {"a.b": 1}"""
  flat = {}
  for key, value in values.items():
    if isinstance(value, dict):
      flat.update(flatten(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = value
  return flat


def config_values(config: ConfigDict) -> dict:
  """The config as plain nested dicts of JSON values."""
  return json.loads(json.dumps(config.copy_and_resolve_references().to_dict()))


class Workdir:
  """A folder that is, or will be, that of a run. Making one writes nothing.

  Attributes:
    path: absolute.
    changes: harmless differences of the config from that of the run so far,
      such as "mesh.data 8 -> 4".
  """

  def __init__(self, path: str | os.PathLike, config: ConfigDict):
    """Args:
      path: may be missing.
      config: of the run.

    Raises:
      UserError: not a folder, in use, or of a run of another config.
    """
    if "://" in os.fspath(path):
      raise UserError(
        f"got --workdir {path}: expected a folder of the file system that all"
        " hosts see, not an address. Mount the bucket (gcsfuse BUCKET FOLDER)"
        " or use a network disk, and set --workdir to a folder in it."
      )
    self.path = pathlib.Path(path).expanduser().absolute()
    self.changes: list[str] = []
    self._values = config_values(config)
    if self.path.exists() and not self.path.is_dir():
      raise UserError(
        f"got --workdir {path}, which is a file: expected a folder. Set"
        " another --workdir."
      )
    if jax.process_index() == 0 and (self.path / ".lock").exists():
      with self._locked():
        pass
    self._require_same_config()

  @property
  def checkpoints(self) -> pathlib.Path:
    return self.path / "checkpoints"

  def _require_same_config(self) -> None:
    before = self._read("config.json")
    if before is None:
      return
    before, now = flatten(before), flatten(self._values)
    missing = object()
    different = [
      key
      for key in sorted(before.keys() | now.keys())
      if before.get(key, missing) != now.get(key, missing)
    ]
    harmless = [key for key in different if key.startswith(HARMLESS)]
    self.changes = [
      f"{key} {before.get(key, 'missing')} -> {now.get(key, 'missing')}"
      for key in harmless
    ]
    different = [
      f"{key}={now.get(key, 'missing')} (that run:"
      f" {before.get(key, 'missing')})"
      for key in different
      if key not in harmless
    ]
    if different:
      raise UserError(
        f"got --workdir {self.path}, which holds a run of another config:"
        f" {', '.join(different)}. Set these --config values as in that run to"
        " continue it, or set another --workdir."
      )

  def summary(self) -> dict | None:
    """What `finish` was given, or None if the run is not finished."""
    return self._read("summary.json")

  def _read(self, name: str) -> dict | None:
    path = self.path / name
    try:
      values = json.loads(path.read_text())
      if not isinstance(values, dict):
        raise ValueError("not a JSON object")
      return values
    except (FileNotFoundError, NotADirectoryError):
      return None
    except (ValueError, OSError) as error:
      raise UserError(
        f"got an unreadable {path} ({error}): expected what a run wrote there."
        " Mend or delete it, or set another --workdir."
      ) from None

  @contextlib.contextmanager
  def open(self) -> Iterator[None]:
    """Makes the folder, and keeps other processes of this machine out of it.

    On all processes of a run; only the first one writes.

    Raises:
      UserError: cannot be made, or in use.
    """
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      if not os.access(self.path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
      raise UserError(
        f"got --workdir {self.path}, which cannot be written to"
        f" ({error.strerror}). Set another --workdir."
      ) from None
    if jax.process_index() != 0:
      yield
      return
    with self._locked():
      changes = self.changes
      self._require_same_config()  # nobody else came in between
      self.changes = changes
      write_atomically(self.path / "config.json", _json(self._values))
      write_atomically(
        self.path / "environment.json",
        _json(environment(self._read("environment.json"))),
      )
      yield

  def require_shared(self) -> None:
    """Raises UserError where this process does not see what the first writes.

    Once it is open, on all processes.
    """
    if jax.process_count() == 1:
      return
    name = from_first(f".seen_by_all.{uuid.uuid4().hex}")
    file = self.path / name
    with together("looking for --workdir"):
      if jax.process_index() == 0:
        file.touch()
      deadline = time.monotonic() + SHARED_S
      # By listing: a network file system remembers that a name was not there.
      while name not in os.listdir(self.path):
        if time.monotonic() > deadline:
          raise UserError(
            f"got --workdir {self.path}, in which process"
            f" {jax.process_index()} does not see what process 0 writes:"
            " expected one folder for all hosts. Set --workdir to a folder on"
            " a network disk or mounted bucket."
          )
        time.sleep(0.1)
    if jax.process_index() == 0:
      file.unlink()

  def finish(self, summary: dict) -> None:
    """Marks the run as finished."""
    if jax.process_index() == 0:
      write_atomically(self.path / "summary.json", _json(summary))

  @contextlib.contextmanager
  def _locked(self) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
      try:
        # The lock goes with the process, however it ends.
        file = stack.enter_context((self.path / ".lock").open("a"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise UserError(
          f"got --workdir {self.path}, in which another process is training"
          " right now. Wait for it or stop it, or set another --workdir."
        ) from None
      except OSError:  # a file system without locks: do without
        pass
      yield


def environment(before: dict | None = None) -> dict:
  """What a run depends on besides its config.

  Args:
    before: of the session before this one; it becomes part of
      `earlier_sessions`.
  """
  earlier = []
  if before is not None:
    earlier = [*before.pop("earlier_sessions", []), before]
  devices = jax.devices()
  return dict(
    started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    commit=provenance.commit(),
    python=platform.python_version(),
    packages=provenance.versions(),
    platform=platform.platform(),
    backend=jax.default_backend(),
    device_kind=devices[0].device_kind,
    device_count=len(devices),
    process_count=jax.process_count(),
    earlier_sessions=earlier,
  )


def _json(values: dict) -> str:
  return json.dumps(values, indent=2) + "\n"
