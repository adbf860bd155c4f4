"""Grain pipelines: shard, batch, prefetch, and a position that can be saved."""

import asyncio
import json
import weakref
from collections.abc import Sequence
from typing import Any

import grain
import jax

from attnres_jax.data.packing import Batch, TrainWindows
from attnres_jax.errors import UserError

# Which flag makes a difference between two runs go away.
_KNOBS = {
  "source": "--config.data.source",
  "seq_len": "--config.data.seq_len",
  "batch_size": "--config.data.batch_size",
  "seed": "--config.run.seed",
  "fingerprint": "--config.data",
  "process_count": "the number of processes",
  "process_index": "the order of the processes",
}


def random_access(
  windows: TrainWindows, batch_size: int, rows: Sequence[int]
) -> grain.IterDataset:
  """Batches of this process, forever.

  Row r of step i of all processes together is window i B + r whatever the
  number of processes. The state is the number of steps, the same for all.

  Args:
    windows: the same for all processes.
    batch_size: B, of all processes together.
    rows: which of [0, B) this process takes.
  """

  # No random-access dataset of grain is endless, but this one lasts.
  def window(k: int) -> Batch:
    step, place = divmod(k, len(rows))
    return windows[step * batch_size + rows[place]]

  batches = grain.MapDataset.range(1 << 48).map(window).batch(len(rows))
  # Prefetching is done by `TrainIterator`, with a thread that can be joined.
  options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  return batches.to_iter_dataset(options)


def prefetched(
  batches: grain.IterDataset, prefetch: int, identity: dict[str, Any]
) -> "TrainIterator":
  """Starts an iterator at the beginning.

  Args:
    batches: what to iterate over; its state must be JSON.
    prefetch: batches prepared ahead, 0: none and no thread.
    identity: what `batches` was made from; a state of another one is refused.
  """
  # A thread, not a process: grain's worker processes need parsed absl flags,
  # which a notebook has not, and reading mapped tokens is cheap.
  ahead = grain.experimental.ThreadPrefetchIterDataset(
    batches, prefetch_buffer_size=prefetch
  )
  return TrainIterator(iter(ahead), identity)


class TrainIterator(grain.DatasetIterator):
  """Batches forever, prefetched by one thread; resumes exactly.

  The state is small and holds no data. It names what the order of the data
  depends on, and is refused where that is different. Orbax takes the iterator
  as a checkpointable. `close` ends the thread; so does garbage collection.
  """

  def __init__(self, batches: grain.DatasetIterator, identity: dict[str, Any]):
    """Use `prefetched`.

    Args:
      batches: taken over.
      identity: what the batches were made from, keys of `_KNOBS`.
    """
    super().__init__()
    self._identity = identity
    self._refused = None
    # Not a parent in grain's sense: at the end of the program it has to be
    # closed and gone before the modules are, or its destructor complains.
    self._ahead = [batches]
    self._finalizer = weakref.finalize(self, _close, self._ahead)

  def __next__(self) -> Batch:
    self._assert_usable()
    return next(self._ahead[0])

  def start_prefetch(self) -> None:
    self._assert_usable()
    self._ahead[0].start_prefetch()

  def close(self) -> None:
    self._closed = True
    self._finalizer()

  def get_state(self) -> dict[str, Any]:
    self._assert_usable()
    return {"position": self._ahead[0].get_state(), "data": self._identity}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues after the batch that was last returned before `get_state`.

    Raises:
      UserError: the state belongs to other data or another way to read it.
    """
    saved = state.get("data", {})
    for key, now in self._identity.items():
      if saved.get(key) != now:
        per_process = " (a stream is read in as many parts as processes)"
        raise UserError(
          f"cannot resume the data: {key} was {saved.get(key)} in the"
          f" checkpoint and is {now} now, expected the same"
          f"{per_process * key.startswith('process_')}. Restore"
          f" {_KNOBS[key]}, or start in a new --workdir."
        )
    self._assert_not_closed()
    self._ahead[0].set_state(state["position"])
    self._refused = None

  async def load(self, directory):
    """Orbax's way to `set_state`, from the files that `save` wrote.

    Each process wrote one. Where the position is that of all processes
    together they are equal, and any number of processes goes on from it; a
    stream was read in as many parts as there were processes.

    Orbax puts an error of its own in the place of one that is raised here, so
    a state that is refused raises the UserError when the iterator is used.
    """

    def load_or_refuse():
      index, count = jax.process_index(), jax.process_count()
      file = directory / f"process_{index}-of-{count}.json"
      if not file.exists():
        there = list(directory.glob("process_0-of-*.json"))
        if len(there) != 1:
          raise FileNotFoundError(f"{file} is missing")
        file = there[0]
      state = json.loads(file.read_text())
      try:
        self.set_state(state)
      except UserError as error:
        self._refused = error

    return asyncio.to_thread(load_or_refuse)

  def _assert_usable(self) -> None:
    self._assert_not_closed()
    if self._refused:
      raise self._refused


def _close(ahead: list) -> None:
  ahead.pop().close()
