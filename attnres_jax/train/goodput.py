"""Where the wall time of a run goes; goodput is the share spent in steps."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

# Every second of a session belongs to exactly one part.
PARTS = {
  "step": "train steps",
  "input": "waiting for a batch",
  "eval": "evaluation",
  "checkpoint": "saving, or waiting for an earlier save",
  "compile": "tracing and compiling",
  "restore": "loading a checkpoint",
  "init": "everything before the first step: data, weights, folder",
}
TRAINING = ("step", "input", "eval", "checkpoint")  # wall_s counts these
# Keys of a metrics line that depend on the machine.
TIMING_KEYS = (
  "tokens_per_s", "data_wait_fraction", "wall_s", "goodput",
  *(f"{part}_s" for part in PARTS),
)  # fmt: skip


class Stopwatch:
  """Runs from the moment it is made; `part` says what the time is spent on.

  A step is dispatched and runs on while the host waits for input, evaluates or
  saves, so "step" is what the host neither waited nor worked for anything
  else: what an ideal input pipeline and free checkpoints would leave.
  """

  def __init__(self):
    self._seconds = dict.fromkeys(PARTS, 0.0)
    self._earlier = dict.fromkeys(PARTS, 0.0)
    self._part, self._since = "init", time.perf_counter()
    self.start_laps(0)

  def add_earlier(self, seconds: Mapping[str, float]) -> None:
    """Adds what earlier sessions of the run took, by part."""
    for part, value in seconds.items():
      self._earlier[part] += value

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """What happens inside belongs to a part of PARTS."""
    before = self._switch(name)
    try:
      yield
    finally:
      self._switch(before)

  def wait_for(self, iterator: Iterator[Any]) -> Any:
    """`next(iterator)`, counted as input."""
    with self.part("input"):
      return next(iterator)

  def session(self) -> dict[str, float]:
    """Seconds of this session so far, by part."""
    self._switch(self._part)
    return dict(self._seconds)

  def total(self) -> dict[str, float]:
    """Seconds of all sessions, by part; lost with unsaved steps: not in it."""
    return {
      k: round(self._earlier[k] + v, 3) for k, v in self.session().items()
    }

  @property
  def training_s(self) -> float:
    """Seconds of training, evaluation and saving, over all sessions."""
    total = self.total()
    return sum(total[part] for part in TRAINING)

  def start_laps(self, step: int) -> None:
    """The next lap begins here.

    Args:
      step: the last one that is done.
    """
    self._lap_step, self._lap = step, self.session()

  def lap(self, step: int, tokens_per_step: int) -> dict[str, float]:
    """The timing values of a metrics line.

    Returns:
      tokens_per_s and data_wait_fraction of the steps since the last lap,
      evaluation and saving left out; wall_s, see `training_s`; goodput and
      seconds by part, of this session.
    """
    now, before = self.session(), self._lap
    waited = now["input"] - before["input"]
    spent = max(now["step"] - before["step"] + waited, 1e-9)
    tokens = (step - self._lap_step) * tokens_per_step
    self._lap_step, self._lap = step, now
    return dict(
      tokens_per_s=round(tokens / spent, 1),
      data_wait_fraction=round(waited / spent, 4),
      wall_s=round(self.training_s, 3),
      goodput=round(goodput(now), 4),
      **{f"{part}_s": round(value, 3) for part, value in now.items()},
    )

  def _switch(self, part: str) -> str:
    now, before = time.perf_counter(), self._part
    self._seconds[before] += now - self._since
    self._part, self._since = part, now
    return before


def goodput(seconds: Mapping[str, float]) -> float:
  """The share of steps in seconds by part; 0 of nothing."""
  return seconds["step"] / max(sum(seconds.values()), 1e-9)


def text(seconds: Mapping[str, float]) -> str:
  """One line for people."""
  parts = ", ".join(
    f"{part} {value:.1f} s" for part, value in seconds.items() if value >= 0.05
  )
  return f"goodput {goodput(seconds):.0%} ({parts})"
