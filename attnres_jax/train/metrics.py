"""metrics.jsonl and TensorBoard files of a run, and its progress bar."""

import json
import pathlib
import sys
import time
from typing import Any

from tqdm import tqdm

from attnres_jax.train.files import write_atomically

FILENAME = "metrics.jsonl"
# What depends on the machine; everything else is the same at every run.
TIMING_KEYS = ("tokens_per_s", "data_wait_fraction", "wall_s")


class MetricsLog:
  """Appends one JSON object per line; each line is whole once it is written.

  Lines after `step` (written, but lost with the state that they belong to)
  are dropped when the log is opened, so that a continued run leaves the file
  that an uninterrupted one does, TIMING_KEYS aside.

  Attributes:
    last_eval: (step, values) of the last line with a `val_loss`, or None.
  """

  def __init__(
    self, folder: pathlib.Path, step: int, *, write: bool, tensorboard: bool
  ):
    """Args:
    folder: the workdir.
    step: that training continues from.
    write: whether this process writes; the others only read.
    tensorboard: also write event files.
    """
    self.last_eval: tuple[int, dict[str, Any]] | None = None
    self._file = self._board = None
    path = folder / FILENAME
    text = path.read_text() if path.exists() else ""
    kept = []
    for line in text.splitlines():
      values = _parse(line)
      if values is not None and values["step"] <= step:
        kept.append(line + "\n")
        if "val_loss" in values:
          self.last_eval = values["step"], values
    if not write:
      return
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


class Stopwatch:
  """Training time since the last `lap`, and the share spent on waiting.

  What happens between `pause` and `resume` (evaluation, saving) is in
  `total_s` only.
  """

  def __init__(self, total_s: float, step: int):
    """Args:
    total_s: seconds that earlier sessions of this run took.
    step: that training continues from.
    """
    now = time.perf_counter()
    self._origin = now - total_s
    self._lap = now
    self._paused_at = now
    self._step = step
    self._waited = 0.0

  @property
  def total_s(self) -> float:
    return time.perf_counter() - self._origin

  def wait_for(self, iterator):
    """`next(iterator)`, counted as waiting."""
    start = time.perf_counter()
    item = next(iterator)
    self._waited += time.perf_counter() - start
    return item

  def pause(self) -> None:
    self._paused_at = time.perf_counter()

  def resume(self) -> None:
    self._lap += time.perf_counter() - self._paused_at

  def lap(self, step: int, tokens_per_step: int) -> dict[str, float]:
    """The timing values of a metrics line, of the steps since the last one."""
    now = time.perf_counter()
    seconds = max(now - self._lap, 1e-9)
    values = dict(
      tokens_per_s=round((step - self._step) * tokens_per_step / seconds, 1),
      data_wait_fraction=round(min(self._waited / seconds, 1.0), 4),
      wall_s=round(self.total_s, 3),
    )
    self._lap, self._step, self._waited = now, step, 0.0
    return values


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
