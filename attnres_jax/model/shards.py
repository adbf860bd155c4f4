"""What a layer knows of the other devices: the collectives of one program.

The model is written for one device's part of everything: its rows of the batch,
its stretch of the tokens, its heads and hidden channels. Where it needs what
other devices hold, it asks its `Shards`. On an axis of size 1 nothing is
emitted and no axis name is needed, so with `Shards()` the same model runs on
one device, outside `jax.shard_map`.

The sequence is split over (seq, tensor), seq major:

  between sublayers   [B, T / (seq * tensor), D]   the device's own tokens
  inside a sublayer   [B, T / seq, ...]            its stretch: `stretch`, `own`
  keys and values     [B, T, ...]                  `keys`

Only all_gather and psum_scatter are ever differentiated: each is the other's
transpose, which is exact without `check_vma` (a psum's is not).

Every collective has the dtype of what it is given. For activations and weights
that is the compute dtype, bfloat16 on a TPU, where it halves the bytes: a sum
over `tensor` adds at most a few dozen partial products that were rounded to
bfloat16 anyway, and a gradient's sum over `fsdp`, the transpose of gathering
the weight, is rounded like the matmul that made it. What is summed over `data`
is float32 (train/gradients.py). With float32 compute all of it is float32.
"""

import dataclasses

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Shards:
  """Sizes of the mesh axes, and how parameters are split over them.

  Attributes:
    fsdp: devices that each store a part of what all of them compute with.
    seq: stretches of the sequence.
    tensor: parts of the heads and hidden channels.
    expert: parts of the experts; splits the batch everywhere else.
    splits: (axes of a parameter, its PartitionSpec); parallel/rules.py has the
      table. A parameter that is not in it is whole on every device.
  """

  fsdp: int = 1
  seq: int = 1
  tensor: int = 1
  expert: int = 1
  splits: tuple[tuple[str, PartitionSpec], ...] = ()

  def whole(self, parameter: nnx.Variable, dtype) -> Array:
    """A parameter as its layer computes with it, in the compute dtype.

    A dimension split over `fsdp` is split for storage only and is put together
    here, with whatever else it is split over; a dimension split over another
    axis alone stays split: the layer computes its part.
    """
    value = parameter[...].astype(dtype)
    axes = parameter.get_metadata("axes", "")
    for dimension, names in enumerate(dict(self.splits).get(axes, ())):
      names = (names,) if isinstance(names, str) else names or ()
      if "fsdp" in names:
        value = self._gather(value, names, dimension)
    return value

  def stretch(self, x: Array) -> Array:
    """[B, T / (seq * tensor), ...] -> [B, T / seq, ...]."""
    return self._gather(x, ("tensor",), 1)

  def own(self, partial: Float[Array, "B T D"]) -> Float[Array, "B t D"]:
    """Sums partial results over `tensor`: a stretch -> the device's tokens."""
    if self.tensor == 1:
      return partial
    return jax.lax.psum_scatter(
      partial, "tensor", scatter_dimension=1, tiled=True
    )

  def keys(self, x: Array) -> Array:
    """[B, T / seq, ...] of a stretch -> [B, T, ...]."""
    return self._gather(x, ("seq",), 1)

  def start(self, length: int) -> int | Array:
    """Where the device's stretch of `length` tokens starts in the sequence."""
    return 0 if self.seq == 1 else jax.lax.axis_index("seq") * length

  def _gather(self, x, names, dimension):
    names = tuple(name for name in names if getattr(self, name) > 1)
    if not names:
      return x
    return jax.lax.all_gather(x, names, axis=dimension, tiled=True)


ONE_DEVICE = Shards()
