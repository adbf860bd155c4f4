"""Causal attention over tokens, from queries, keys and values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
  rows = q_start + jnp.arange(q_BTNH.shape[1])
  causal_TS = rows[:, None] >= jnp.arange(k_BSKH.shape[1])
  same_BTS = q_segments_BT[:, :, None] == k_segments_BS[:, None, :]
  mask_BTS = same_BTS & causal_TS
  return jax.nn.dot_product_attention(
    q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None]
  )
