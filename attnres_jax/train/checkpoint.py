"""Checkpoints of a run: parameters, optimizer, step and place in the data.

The only file that knows Orbax. A checkpoint appears under its final name in
one rename, after everything in it is on disk, and older ones are removed only
then: whatever happens, the newest complete one can be loaded.
"""

import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from attnres_jax.errors import UserError
from attnres_jax.parallel.distributed import from_first
from attnres_jax.train.program import TrainState

# Metadata, the data position and rounding up to file-system blocks.
OVERHEAD_BYTES = 2**20
NO_SPACE = ("No space left on device", "Disk quota exceeded")
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of what is being saved


class Checkpoints:
  """The checkpoints in a folder. Saves in the background; one at a time."""

  def __init__(self, folder: pathlib.Path, keep: int):
    """Args:
    folder: absolute; made if it is missing.
    keep: how many of the newest stay.
    """
    self.folder = folder
    if jax.process_index() == 0:
      # Left by a process that was killed while saving. Orbax can do this too,
      # but in the background, with nothing to tell that it is done.
      for left in folder.glob(f"*{UNFINISHED}*"):
        shutil.rmtree(left)
    self._checkpointer = ocp.training.Checkpointer(
      folder,
      preservation_policy=ocp.training.preservation_policies.LatestN(keep),
    )

  @property
  def latest(self) -> int | None:
    """Step of the newest complete checkpoint (of one being saved, too)."""
    latest = self._checkpointer.latest
    return from_first(None if latest is None else latest.step)

  def save(
    self, step: int, state: TrainState, iterator: Any, facts: dict[str, Any]
  ) -> None:
    """Starts to save; returns as soon as the state may change again.

    Args:
      step: optimizer steps taken.
      state: finite: nothing is checked here.
      iterator: of the training data, at the first batch not trained on.
      facts: small JSON values, given back by `restore`.

    Raises:
      UserError: not enough disk space; earlier checkpoints are untouched.
    """
    self.wait()
    self.require_space(state)
    self._checkpointer.save_checkpointables_async(
      step,
      dict(state=vars(state), data=iterator),
      force=True,
      custom_metadata=dict(processes=jax.process_count(), **facts),
    )

  def wait(self) -> None:
    """Returns once everything is on disk.

    Raises:
      UserError: the disk became full while saving.
    """
    try:
      self._checkpointer.wait()
    except Exception as error:  # of any type: Orbax, TensorStore, the system
      if not any(text in str(error) for text in NO_SPACE):
        raise
      raise UserError(self._no_space("became full")) from error

  def require_space(self, state: TrainState) -> None:
    """Raises UserError if a checkpoint of `state` does not fit on the disk."""
    leaves = jax.tree.leaves(state)
    need = OVERHEAD_BYTES + sum(x.size * x.dtype.itemsize for x in leaves)
    free = from_first(shutil.disk_usage(self.folder).free)
    if free < need:
      raise UserError(
        self._no_space(
          f"has {free / 2**20:.1f} MiB free, expected {need / 2**20:.1f} MiB"
          " for the next checkpoint"
        )
      )

  def _no_space(self, what: str) -> str:
    return (
      f"got no space to save: the disk of {self.folder} {what}. Free some, or"
      " copy the run to another disk and set --workdir; what was saved before"
      " is whole."
    )

  def restore(
    self, step: int, abstract_state: TrainState, iterator: Any
  ) -> tuple[TrainState, dict[str, Any]]:
    """Loads a checkpoint onto the devices of `abstract_state`.

    These, and the processes, may be others than those that saved it.

    Args:
      step: of a complete checkpoint.
      abstract_state: shapes, dtypes and shardings to load.
      iterator: of the training data; is moved to where the run was.

    Returns:
      The state, and the facts given to `save` along with `processes`, how
      many there were.

    Raises:
      UserError: the checkpoint is damaged or of another model, or the data is
        not the same.
    """
    where = self.folder / str(step)
    try:
      metadata = self._checkpointer.metadata(step)
      if metadata.metadata is None:  # said in the log, not by an exception
        raise FileNotFoundError("files are missing")
      stored = _shapes(metadata.metadata)
    except Exception as error:
      raise _damaged(where, error) from error
    _require_equal(stored, _shapes(vars(abstract_state)), where)
    try:
      loaded = self._checkpointer.load_checkpointables(
        step, dict(state=vars(abstract_state), data=iterator)
      )
    except UserError:
      raise
    except Exception as error:
      raise _damaged(where, error) from error
    return TrainState(**loaded["state"]), dict(metadata.custom_metadata)

  def close(self) -> None:
    """Waits for what is being saved."""
    self._checkpointer.close()


def _shapes(tree: Any) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  """{"params.embedding": (shape, dtype)}; the same for arrays and for what
  Orbax says is stored."""
  found = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    found[".".join(names)] = tuple(leaf.shape), np.dtype(leaf.dtype)
  return found


def _require_equal(stored: dict, wanted: dict, where: pathlib.Path) -> None:
  differences = []
  for name in sorted(stored.keys() | wanted.keys()):
    there = stored.get(name, "nothing")
    here = wanted.get(name, "nothing")
    if there != here:
      differences.append(f"{name} is {_text(there)}, expected {_text(here)}")
  if differences:
    more = len(differences) - 3
    raise UserError(
      f"got a checkpoint of another model in {where}:"
      f" {'; '.join(differences[:3])}{f'; and {more} more' * (more > 0)}. Set"
      " the --config of that run, or another --workdir."
    )


def _text(entry) -> str:
  if isinstance(entry, str):
    return entry
  shape, dtype = entry
  return f"{dtype.name}[{','.join(map(str, shape))}]"


def _damaged(where: os.PathLike, error: Exception) -> UserError:
  reason = str(error).strip().splitlines() or [""]
  return UserError(
    f"got an unreadable checkpoint {where}: {type(error).__name__}:"
    f" {reason[0][:200]}. Delete that folder to continue from the checkpoint"
    " before it, or set another --workdir."
  )
