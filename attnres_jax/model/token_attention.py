"""Causal attention over tokens, from queries, keys and values.

Memory is linear in the tokens: what is kept for the backward pass is the
operands, the result and one number per query, log(sum exp) of its logits.
On a TPU it is splash attention, elsewhere loops over chunks in plain JAX.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnres_jax.model import token_attention_tpu

# Queries, and keys, of one step of the loops. Within a chunk all pairs are
# computed, so a larger one wastes more above the diagonal.
CHUNK = 512
# A logit that is masked out. Finite, so that rows that have seen only such
# logits so far stay numbers; the first one that counts makes them 0.
MASKED = -1e30


def attend(
  q_BTNH: Float[Array, "B T N H"],
  k_BSKH: Float[Array, "B S K H"],
  v_BSKH: Float[Array, "B S K H"],
  q_segments_BT: Int[Array, "B T"],
  k_segments_BS: Int[Array, "B S"],
  q_start: int | Int[Array, ""] = 0,
) -> Float[Array, "B T N H"]:
  """Attention of T queries, which may be a part of the sequence, over S keys.

  Args:
    q_BTNH: queries of the tokens q_start .. q_start + T - 1.
    k_BSKH: keys of the tokens 0 .. S - 1; K divides N.
    v_BSKH: values of the same tokens.
    q_segments_BT: tokens see earlier ones of equal segment id.
    k_segments_BS: of the keys.
    q_start: where the queries are among the keys.

  Returns:
    softmax(q . k / sqrt(H)) v, in the dtype of the queries.
  """
  args = q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS
  if token_attention_tpu.usable(q_BTNH, k_BSKH, q_start):
    return token_attention_tpu.attend(*args)
  return attend_in_chunks(*args, q_start)


def attend_in_chunks(
  q_BTNH: Float[Array, "B T N H"],
  k_BSKH: Float[Array, "B S K H"],
  v_BSKH: Float[Array, "B S K H"],
  q_segments_BT: Int[Array, "B T"],
  k_segments_BS: Int[Array, "B S"],
  q_start: int | Int[Array, ""] = 0,
  chunk: int = CHUNK,
) -> Float[Array, "B T N H"]:
  """As `attend`, on any device, `chunk` queries by `chunk` keys at a time."""
  tokens = q_BTNH.shape[1]
  # What pads the keys is later than every query; results of queries that are
  # padding are dropped.
  q, q_segments = (_chunks(x, chunk) for x in (q_BTNH, q_segments_BT))
  k, v, k_segments = (
    _chunks(x, chunk) for x in (k_BSKH, v_BSKH, k_segments_BS)
  )
  i, b, t, n, h = q.shape
  groups = k.shape[3]
  # [I, B, K, G, T, H] and [J, B, K, S, H]: plain batched matmuls, in which
  # the query heads of a group share keys without a copy of them.
  q = q.reshape(i, b, t, groups, n // groups, h).transpose(0, 1, 3, 4, 2, 5)
  k, v = (x.transpose(0, 1, 3, 2, 4) for x in (k, v))
  out = _attend(
    q * jnp.asarray(h**-0.5, q.dtype), k, v, q_segments, k_segments,
    jnp.asarray(q_start, jnp.int32),
  )  # fmt: skip
  out = out.transpose(1, 0, 4, 2, 3, 5).reshape(b, i * t, n, h)
  return out[:, :tokens]


def _chunks(x, chunk):
  """[B, T, ...] -> [chunks, B, tokens of a chunk, ...], zeros at the end."""
  length = x.shape[1]
  number = -(-length // chunk)
  size = -(-length // number)
  padding = [(0, 0)] * x.ndim
  padding[1] = (0, number * size - length)
  x = jnp.pad(x, padding).reshape(x.shape[0], number, size, *x.shape[2:])
  return x.swapaxes(0, 1)


@jax.custom_vjp
def _attend(q, k, v, q_segments, k_segments, q_start):
  """Attention over chunks.

  Args:
    q: [I, B, K, G, T, H], scaled; I chunks of T queries.
    k: [J, B, K, S, H]; J chunks of S keys.
    v: as k.
    q_segments: [I, B, T].
    k_segments: [J, B, S].
    q_start: position of the first query.

  Returns:
    Like q.
  """
  return _attend_forward(q, k, v, q_segments, k_segments, q_start)[0]


def _attend_forward(q, k, v, q_segments, k_segments, q_start):
  seen = functools.partial(_seen, q_start, q.shape[4], k.shape[3])

  def queries(_, chunk):
    i, q_i, segments_i = chunk

    def keys(j, carry):
      largest, total, out = carry
      logits = _logits("BKGTH,BKSH->BKGTS", q_i, k[j])
      mask = seen(i, j, segments_i, k_segments[j])
      logits = jnp.where(mask[:, None, None], logits, MASKED)
      new = jnp.maximum(largest, logits.max(-1))
      weights = jnp.exp(logits - new[..., None])
      shrunk = jnp.exp(largest - new)
      out = out * shrunk[..., None] + _logits(
        "BKGTS,BKSH->BKGTH", weights.astype(v.dtype), v[j]
      )
      return new, total * shrunk + weights.sum(-1), out

    rows = jnp.zeros(q_i.shape[:-1], jnp.float32)
    start = rows + MASKED, rows, jnp.zeros(q_i.shape, jnp.float32)
    last = _last_keys(i, q_start, q.shape[4], k)
    largest, total, out = _loop(last, len(k), keys, start)
    out = (out / total[..., None]).astype(q.dtype)
    return None, (out, largest + jnp.log(total))

  chunks = jnp.arange(len(q)), q, q_segments
  _, (out, log_sum) = _scan(queries, None, chunks)
  return out, (q, k, v, q_segments, k_segments, q_start, out, log_sum)


def _attend_backward(saved, d_out):
  """Weights are made again, keys by queries: then no matmul but that of d_q
  has to turn a large operand around."""
  q, k, v, q_segments, k_segments, q_start, out, log_sum = saved
  seen = functools.partial(_seen, q_start, q.shape[4], k.shape[3])
  product = d_out.astype(jnp.float32) * out.astype(jnp.float32)
  radial = product.sum(-1)

  def queries(carry, chunk):
    i, q_i, segments_i, d_out_i, log_sum_i, radial_i = chunk

    def keys(j, carry):
      d_q, d_k, d_v = carry
      logits = _logits("BKSH,BKGTH->BKGST", k[j], q_i)
      mask = seen(i, j, segments_i, k_segments[j]).swapaxes(1, 2)
      logits = jnp.where(mask[:, None, None], logits, MASKED)
      weights = jnp.exp(logits - log_sum_i[..., None, :])
      d_weights = _logits("BKSH,BKGTH->BKGST", v[j], d_out_i)
      d_logits = weights * (d_weights - radial_i[..., None, :])
      weights, d_logits = weights.astype(v.dtype), d_logits.astype(v.dtype)
      d_v_j = _logits("BKGST,BKGTH->BKSH", weights, d_out_i)
      d_k_j = _logits("BKGST,BKGTH->BKSH", d_logits, q_i)
      d_q_j = _logits("BKGST,BKSH->BKGTH", d_logits, k[j])
      return d_q + d_q_j, d_k.at[j].add(d_k_j), d_v.at[j].add(d_v_j)

    start = jnp.zeros(q_i.shape, jnp.float32), *carry
    last = _last_keys(i, q_start, q.shape[4], k)
    d_q, *carry = _loop(last, len(k), keys, start)
    return tuple(carry), d_q.astype(q.dtype)

  zeros = jnp.zeros(k.shape, jnp.float32)
  chunks = jnp.arange(len(q)), q, q_segments, d_out, log_sum, radial
  (d_k, d_v), d_q = _scan(queries, (zeros, zeros), chunks)
  return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _logits(einsum, a, b):
  return jnp.einsum(einsum, a, b, preferred_element_type=jnp.float32)


def _seen(q_start, q_size, k_size, i, j, q_segments, k_segments):
  """[B, T, S]: which keys of chunk j the queries of chunk i see."""
  rows = q_start + i * q_size + jnp.arange(q_size)
  columns = j * k_size + jnp.arange(k_size)
  same = q_segments[:, :, None] == k_segments[:, None, :]
  return same & (rows[:, None] >= columns)


def _last_keys(i, q_start, q_size, k):
  """Number of chunks of keys that are not wholly later than the queries."""
  last_query = q_start + (i + 1) * q_size - 1
  return jnp.minimum(last_query // k.shape[3] + 1, len(k))


def _loop(last, number, body, start):
  """`number` bounds `last`; a single step is no loop."""
  if number == 1:
    return body(0, start)
  return jax.lax.fori_loop(0, last, body, start)


def _scan(body, carry, chunks):
  """`lax.scan`; a single step is no loop."""
  if len(chunks[0]) > 1:
    return jax.lax.scan(body, carry, chunks)
  carry, result = body(carry, jax.tree.map(lambda x: x[0], chunks))
  return carry, jax.tree.map(lambda x: x[None], result)
