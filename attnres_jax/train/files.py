"""Files that are never seen half written."""

import os
import pathlib
import tempfile


def write_atomically(path: pathlib.Path, text: str) -> None:
  """Writes a text file; after a crash it is the old or the new one."""
  handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
  try:
    with os.fdopen(handle, "w") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise
