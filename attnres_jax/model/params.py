"""Parameter roles, by variable type: what the optimizer treats differently."""

from flax import nnx


class NormScale(nnx.Param):
  """The scale of an RMSNorm: no weight decay."""


class Embedding(nnx.Param):
  """A row per vocabulary entry (the embedding, an untied head)."""
