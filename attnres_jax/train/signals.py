"""Ctrl-C and SIGTERM ask the loop to stop; they do not break into a step."""

import os
import signal
import threading

_NOTE = (
  b"\nStopping after this step, then saving."
  b" Ctrl-C again exits at once, without saving.\n"
)


class StopRequest:
  """While entered, the first SIGINT or SIGTERM only sets `signal`.

  A SIGINT after that raises KeyboardInterrupt. Outside the main thread, where
  Python allows no handlers, and for a signal that the process ignores (nohup),
  nothing changes.

  Attributes:
    signal: number of the first signal, 0 for none.
  """

  def __init__(self):
    self.signal = 0
    self._previous = {}

  def __enter__(self):
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGINT, signal.SIGTERM):
        # None: a handler that Python did not install and could not restore.
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
          self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous.clear()

  def _handle(self, number, frame):
    del frame
    if self.signal:
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      return
    self.signal = number
    os.write(2, _NOTE)  # `print` is not safe inside a handler
