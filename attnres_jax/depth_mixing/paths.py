"""Who computes attention over depth: the kernel package or generic JAX.

A mixer chooses one path in its constructor. Both have the same two methods,
the two phases of the schedule. They hold no parameters: those are in the query
(queries.py), which is handed in, as are rows, the `query.at(l)` of sublayers.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from attnres_jax.depth_mixing import attention
from attnres_jax.depth_mixing.attention import Partial
from attnres_jax.depth_mixing.base import FusableNorm, Norm
from attnres_jax.errors import UserError, unknown_name
from attnres_kernels import depth_attention
from attnres_kernels.depth_attention import Attended, Merged


class DepthState(NamedTuple):
  """Sources, in order.

  Attributes:
    finished: sources that no later sublayer changes; the embedding is first.
    recent: sources of the running block; empty at its start.
    pending: what the last sublayer returned, if it is still to be added to the
      last recent source: the next `read` has that source at hand anyway.
    previous: the last mixture that was read (only with query_input="previous").
  """

  finished: tuple[Float[Array, "B T D"], ...]
  recent: tuple[Float[Array, "B T D"], ...] = ()
  pending: Float[Array, "B T D"] | None = None
  previous: Float[Array, "B T D"] | None = None

  def added(self) -> "DepthState":
    """The state with nothing pending. The sum is float32."""
    if self.pending is None:
      return self
    *others, last = self.recent
    total = last.astype(jnp.float32) + self.pending.astype(jnp.float32)
    return self._replace(recent=(*others, total), pending=None)

  def closed(self) -> "DepthState":
    """The state with every source finished, in the embedding's dtype."""
    dtype = self.finished[0].dtype
    recent = tuple(v.astype(dtype) for v in self.added().recent)
    return self._replace(
      finished=self.finished + recent, recent=(), pending=None
    )

  def current(self) -> Float[Array, "B T D"]:
    """What feeds input-dependent queries."""
    if self.previous is not None:
      return self.previous
    state = self.added()
    return (state.finished + state.recent)[-1]


@dataclasses.dataclass(frozen=True)
class KernelPath:
  """Softmax, one head, queries that no token changes: `attnres_kernels`.

  Attributes:
    implementation: a name of `depth_attention.IMPLEMENTATIONS`; None: the
      package's choice for the platform.
  """

  implementation: str | None

  def attend(
    self, query: nnx.Module, rows: Sequence[Array], state: DepthState
  ) -> Sequence[Attended]:
    """Phase 1: the queries `rows` over the finished sources."""
    return depth_attention.attend(
      jnp.concatenate(rows),
      state.finished,
      eps=query.keys.eps,
      implementation=self.implementation,
    )

  def merge(
    self,
    query: nnx.Module,
    row: Array,
    attended: Attended,
    state: DepthState,
    norm: Norm,
  ) -> Merged:
    """Phase 2: adds what is pending, merges the recent sources in, and norms
    the mixture, in one pass if the norm can be fused."""
    scale = eps = None
    if isinstance(norm, FusableNorm):
      scale = None if norm.scale is None else norm.scale[...]
      eps = norm.eps
    merged = depth_attention.merge(
      row[0],
      attended,
      state.recent,
      state.pending,
      eps=query.keys.eps,
      norm_scale=scale,
      norm_eps=eps,
      implementation=self.implementation,
    )
    if eps is None:
      merged = merged._replace(normed=norm(merged.normed))
    return merged

  def describe(self) -> str:
    return f"kernel package, implementation {self.implementation or 'default'}"


@dataclasses.dataclass(frozen=True)
class GenericPath:
  """Everything else, in plain JAX on every platform (attention.py).

  Attributes:
    activation: a name of `attention.ACTIVATIONS`.
    why: the options that only this path has.
  """

  activation: str
  why: str

  def attend(self, query, rows, state) -> Sequence[Partial]:
    """As in KernelPath."""
    return self._attend(query, rows, state, state.finished, first=0)

  def merge(self, query, row, attended, state, norm) -> Merged:
    """As in KernelPath, and always with the mixture before the norm."""
    total = None
    if state.pending is not None:
      state = state.added()
      total = state.recent[-1]
    if state.recent:
      first = len(state.finished)
      (recent,) = self._attend(query, [row], state, state.recent, first)
      attended = attention.merge(attended, recent)
    h_BTD = attention.normalise(
      attended, attention.ACTIVATIONS[self.activation]
    )
    h_BTD = h_BTD.astype(state.finished[0].dtype)
    return Merged(norm(h_BTD), total, h_BTD)

  def _attend(self, query, rows, state, sources, first) -> list[Partial]:
    logits_QRBTH = query.logits(rows, sources, first, state.current())
    activation = attention.ACTIVATIONS[self.activation]
    return attention.attend(logits_QRBTH, sources, activation)

  def describe(self) -> str:
    return f"generic XLA path ({self.why})"


def choose(
  query: str, activation: str, heads: int, implementation: str | None
) -> KernelPath | GenericPath:
  """The path for these options of a mixer.

  Raises:
    UserError: no such implementation; or one that is named although only the
      generic path has the other options: it would not be what runs.
  """
  known = depth_attention.IMPLEMENTATIONS
  if implementation is not None and implementation not in known:
    raise unknown_name(
      "implementation", implementation, known, "--config.mixer.implementation"
    )
  generic = {
    f"query={query}": query != "static",
    f"activation={activation}": activation != "softmax",
    f"heads={heads}": heads > 1,
  }
  why = ", ".join(option for option, needed in generic.items() if needed)
  if not why:
    return KernelPath(implementation)
  if implementation is not None:
    raise UserError(
      f"got implementation {implementation!r} with {why}: expected"
      " query=static, activation=softmax and heads=1, which is what the kernel"
      " package has. Set those, or leave out --config.mixer.implementation."
    )
  return GenericPath(activation, why)
