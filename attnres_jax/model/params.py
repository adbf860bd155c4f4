"""Parameter roles, by variable type: what the optimizer treats differently.

Parameters that are split over devices carry their axes as letters, in the
metadata `axes` of the variable; parallel/rules.py says how they are split.
"""

from flax import nnx


class NormScale(nnx.Param):
  """The scale of an RMSNorm: no weight decay."""


class Embedding(nnx.Param):
  """A row per vocabulary entry (the embedding, an untied head)."""
