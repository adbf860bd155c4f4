"""metrics.jsonl and TensorBoard files of a run, and its progress bar."""

import json
import pathlib
import sys
import time
from typing import Any

from tqdm import tqdm

from attnres_jax.train.files import write_atomically
from attnres_jax.train.goodput import TIMING_KEYS

FILENAME = "metrics.jsonl"


class MetricsLog:
  """Appends one JSON object per line; each line is whole once it is written.

  Lines after `step` (written, but lost with the state that they belong to)
  are dropped when the log is opened, so that a continued run leaves the file
  that an uninterrupted one does, TIMING_KEYS aside (they depend on the
  machine).

  Attributes:
    last_eval: (step, values) of the last line with a `val_loss`, or None.
  """

  def __init__(
    self, folder: pathlib.Path, step: int, *, write: bool, tensorboard: bool
  ):
    """Args:
    folder: the workdir.
    step: that training continues from.
    write: whether this process reads and writes the files. The others keep
      only what they are given.
    tensorboard: also write event files.
    """
    self.last_eval: tuple[int, dict[str, Any]] | None = None
    self._file = self._board = None
    if not write:
      return
    path = folder / FILENAME
    text = path.read_text() if path.exists() else ""
    kept = []
    for line in text.splitlines():
      values = _parse(line)
      if values is not None and values["step"] <= step:
        kept.append(line + "\n")
        if "val_loss" in values:
          self.last_eval = values["step"], values
    if "".join(kept) != text:
      write_atomically(path, "".join(kept))
    self._file = path.open("a")
    if tensorboard:
      from tensorboardX import SummaryWriter  # takes a second to import

      # Readers forget what an earlier attempt wrote from that step on.
      self._board = SummaryWriter(
        str(folder / "tensorboard"), purge_step=step + 1
      )

  def write(self, step: int, values: dict[str, float]) -> None:
    """Adds a line. Values are plain numbers."""
    if "val_loss" in values:
      self.last_eval = step, {"step": step, **values}
    if self._file is None:
      return
    self._file.write(json.dumps({"step": step, **values}) + "\n")
    self._file.flush()
    if self._board is not None:
      for name, value in values.items():
        group = "val" if name.startswith("val_") else "train"
        group = "time" if name in TIMING_KEYS else group
        self._board.add_scalar(f"{group}/{name}", value, step)

  def close(self) -> None:
    for writer in (self._file, self._board):
      if writer is not None:
        writer.close()


def _parse(line: str) -> dict[str, Any] | None:
  """The line, or None if it is not whole (the process was killed)."""
  try:
    values = json.loads(line)
  except json.JSONDecodeError:
    return None
  return values if isinstance(values, dict) and "step" in values else None


class Progress:
  """A bar on standard error: steps, time left, loss, tokens per second."""

  def __init__(self, steps: int, start: int, tokens_per_step: int, show: bool):
    # In a log file every redraw is a line: draw rarely there.
    interval = 0.5 if sys.stderr.isatty() else 30.0
    self._bar = tqdm(
      total=steps, initial=start, unit="step", disable=not show,
      file=sys.stderr, mininterval=interval, dynamic_ncols=True,
    )  # fmt: skip
    self._tokens_per_step = tokens_per_step
    self._start = time.perf_counter()
    self._done = 0
    self._text = self._val = ""

  def update(self, loss: float) -> None:
    """One more step is done."""
    self._done += 1
    speed = self._done * self._tokens_per_step
    speed /= max(time.perf_counter() - self._start, 1e-9)
    self._text = f"loss {loss:.4f}, {speed:,.0f} tokens/s"
    self._bar.set_postfix_str(self._text + self._val, refresh=False)
    self._bar.update()

  def validated(self, val_loss: float) -> None:
    """An evaluation is done."""
    self._val = f", val {val_loss:.4f}"
    self._bar.set_postfix_str(self._text + self._val)

  def close(self) -> None:
    self._bar.close()
