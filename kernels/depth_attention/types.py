"""What the op returns, and the options that its implementations are given."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Attended(NamedTuple):
  """Softmax attention of one query over some of its sources.

  Attributes:
    out: [..., T, D], the dtype of the sources: the weighted mean. It is
      already divided by `sum`, so that its size is a source's.
    max: [..., T] float32: the largest logit. It is a shift that cancels in
      every use, so no gradient flows through it.
    sum: [..., T] float32: sum of exp(logit - max), at least 1.
  """

  out: Float[Array, "... T D"]
  max: Float[Array, "... T"]
  sum: Float[Array, "... T"]


class Merged(NamedTuple):
  """What `merge` makes of a finished and a recent part.

  Attributes:
    normed: [..., T, D]: RMSNorm of the merged mixture, the sublayer's input.
    total: [..., T, D]: recent[-1] + update; None without an update.
    merged: [..., T, D]: the mixture before the norm; None unless asked for.
  """

  normed: Float[Array, "... T D"]
  total: Float[Array, "... T D"] | None
  merged: Float[Array, "... T D"] | None


class MergeOptions(NamedTuple):
  """Static options of `merge`, after api.py has resolved the defaults.

  Attributes:
    key_eps: added to the mean square in the key norm; None: raw keys.
    norm_eps: added to the mean square in the output norm; None: no norm.
    dtype: of `normed` and `merged`.
    total_dtype: of `total`.
    return_merged: whether `merged` is wanted.
  """

  key_eps: float | None
  norm_eps: float | None
  dtype: jnp.dtype
  total_dtype: jnp.dtype
  return_merged: bool
