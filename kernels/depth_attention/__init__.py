"""Attention over depth: the two-phase op and its implementations.

`attend` and `merge` are the public functions; see api.py.
"""

from attnres_kernels.depth_attention.api import (
  IMPLEMENTATIONS,
  attend,
  merge,
)
from attnres_kernels.depth_attention.types import Attended, Merged

__all__ = ["IMPLEMENTATIONS", "Attended", "Merged", "attend", "merge"]
