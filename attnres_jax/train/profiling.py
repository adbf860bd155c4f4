"""A trace of a few steps, for XProf or TensorBoard's profile plugin."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

FOLDER = "profile"


class Profiler:
  """Traces the steps [first, first + count) of a run; count 0: nothing.

  On process 0 only: all hosts run the same program, and a trace of one has the
  collectives in it, with their waits.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    first: int,
    count: int,
    say: Callable[[str], None],
  ):
    """Args:
    workdir: traces come into its folder `profile`.
    first: step, counted from 1.
    count: steps.
    say: is told where the trace is.
    """
    self._folder = workdir / FOLDER
    active = count > 0 and jax.process_index() == 0
    self._steps = range(first, first + count) if active else range(0)
    self._say, self._tracing = say, False

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Around a step; a run that continues behind the first starts there."""
    if step in self._steps and not self._tracing:
      jax.profiler.start_trace(str(self._folder))
      self._tracing = True
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      yield

  def after(self, step: int, results: Any) -> None:
    """Ends the trace after its last step.

    Args:
      step: that was dispatched.
      results: arrays that are ready when the step is done.
    """
    if self._tracing and step == self._steps[-1]:
      jax.block_until_ready(results)
      self.close()

  def close(self) -> None:
    """Ends a trace that is running."""
    if not self._tracing:
      return
    self._tracing = False
    jax.profiler.stop_trace()
    self._say(
      f"trace: {self._folder}; to see it: pip install xprof && xprof"
      f" --logdir={self._folder} --port=8791"
    )
