"""Where the logits of depth attention come from: three kinds of query.

Each class owns the parameters of all L + 1 queries (the last one belongs to
the aggregation at the output) and turns sources into logits. `at(l)` cuts out
one query's parameters; `logits` never sees an index.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from attnres_jax.depth_mixing.attention import HIGHEST, inverse_rms
from attnres_jax.depth_mixing.base import DepthParam


class KeyNorm(nnx.Module):
  """RMSNorm of the keys, with a learned scale per query (init 1)."""

  def __init__(self, queries: int, width: int, eps: float):
    self.scale = DepthParam(jnp.ones((queries, width), jnp.float32))
    self.eps = eps

  def at(self, l: int) -> Float[Array, "D"]:
    return self.scale[l]

  def inverse(self, v: Float[Array, "B T D"]) -> Float[Array, "B T 1"]:
    return inverse_rms(v, self.eps)


class RawKeys(nnx.Module):
  """Keys are the sources themselves (Table 4, "no RMSNorm on keys")."""

  eps = None

  def at(self, l: int) -> float:
    del l
    return 1.0

  def inverse(self, v: Float[Array, "B T D"]) -> float:
    del v
    return 1.0


class StaticQuery(nnx.Module):
  """The paper's pseudo-query: logit = w_l . (RMSNorm(v) * g_l), w_l from zero.

  w_l and g_l only ever meet as their product, which is formed once per query
  and not per token. With H heads, head h compares its own D / H channels; the
  norm is over all D.
  """

  two_phase = True

  def __init__(self, queries, width, heads, keys):
    self.query = DepthParam(jnp.zeros((queries, width), jnp.float32))
    self.keys = keys
    self.heads = heads

  def at(self, l: int) -> Float[Array, "H d"]:
    product = self.query[l] * self.keys.at(l)
    return product.reshape(self.heads, -1)

  def logits(
    self,
    queries: Sequence[Float[Array, "H d"]],
    sources: Sequence[Float[Array, "B T D"]],
    first: int,
    current: Float[Array, "B T D"],
  ) -> Float[Array, "Q R B T H"]:
    """Logits of Q queries on R sources, float32.

    Args:
      queries: `at(l)` of each query.
      sources: what they read.
      first: slot of the first source among all that these queries read.
      current: the current hidden state.
    """
    del first, current
    query_QHd = jnp.stack(queries)
    q, h, d = query_QHd.shape
    # Heads side by side as one block-diagonal matrix: a plain matmul reads
    # each source once, for all queries and heads.
    blocks = jnp.einsum("QHd,HG->HdQG", query_QHd, jnp.eye(h))
    matrix = blocks.reshape(h * d, q * h)
    logits = []
    for v in sources:
      dots = jnp.dot(v.astype(jnp.float32), matrix, precision=HIGHEST)
      dots = (dots * self.keys.inverse(v)).reshape(*v.shape[:2], q, h)
      logits.append(jnp.moveaxis(dots, 2, 0))
    return jnp.stack(logits, axis=1)


class InputQuery(nnx.Module):
  """Input-dependent query (Table 4): q = W_l RMSNorm(current hidden state) / D.

  The paper gives a D x D matrix per layer but neither its input nor its init.
  Here: zero init, as the pseudo-queries have it; the input is RMS-normalised
  without a scale, since a raw source may have any magnitude; and `current` is
  the mixer's choice (its option `query_input`). Divided by D, one Adam step
  moves a logit by as much as it does with a pseudo-query: its D x D entries
  all move at once, and undivided the weights saturate in the first steps. A
  query per token depends on the sublayer before it, so it can't be batched
  into phase 1.
  """

  two_phase = False

  def __init__(self, queries, width, heads, keys, eps):
    self.query = DepthParam(jnp.zeros((queries, width, width), jnp.float32))
    self.keys = keys
    self.heads = heads
    self.eps = eps

  def at(self, l: int) -> Float[Array, "D D"]:
    return self.query[l] * self.keys.at(l) / self.query.shape[-1]

  def logits(self, queries, sources, first, current):
    del first
    h_BTD = current.astype(jnp.float32) * inverse_rms(current, self.eps)
    rows = []
    for matrix in queries:
      q_BTD = jnp.einsum("BTC,CD->BTD", h_BTD, matrix, precision=HIGHEST)
      columns = []
      for v in sources:
        shape = (*v.shape[:2], self.heads, -1)
        product = (q_BTD * v.astype(jnp.float32)).reshape(shape)
        columns.append(product.sum(-1) * self.keys.inverse(v))
      rows.append(jnp.stack(columns))
    return jnp.stack(rows)


class NoQuery(nnx.Module):
  """Input-independent mixing (Table 4): a learned scalar per query and source.

  The paper says neither whether the scalars pass through phi nor their init.
  Here they are the logits and start at zero, so that the mixture starts as the
  same equal average as everywhere else.
  """

  two_phase = True

  def __init__(self, source_counts: Sequence[int], heads: int):
    self.scalars = nnx.List(
      [DepthParam(jnp.zeros((n, heads), jnp.float32)) for n in source_counts]
    )

  def at(self, l: int) -> Float[Array, "R H"]:
    return self.scalars[l][...]

  def logits(self, queries, sources, first, current):
    del current
    b, t = sources[0].shape[:2]
    rows = [q[first : first + len(sources)] for q in queries]
    logits_QRH = jnp.stack(rows)
    q, r, h = logits_QRH.shape
    return jnp.broadcast_to(logits_QRH[:, :, None, None], (q, r, b, t, h))
