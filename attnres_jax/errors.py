"""Errors that are the user's to mend: one line, got / expected / which knob."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """Bad input. The message is one line: what was got, what was expected, and
  which config key or flag to change. Scripts print it without a traceback."""


def unknown_name(
  kind: str, got: str, known: Iterable[str], knob: str
) -> UserError:
  """An error for a name that does not exist, with the nearest that does.

  Args:
    kind: what the name stands for, e.g. "mixer".
    got: the unknown name.
    known: every valid name.
    knob: where the user sets it, e.g. "--config=...:mixer=NAME".

  Returns:
    The error, to be raised by the caller.
  """
  names = sorted(known)
  near = difflib.get_close_matches(str(got), names, n=1, cutoff=0.4)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  return UserError(
    f"unknown {kind} {got!r}: expected one of {', '.join(names)}.{hint}"
    f" Set it with {knob}."
  )
