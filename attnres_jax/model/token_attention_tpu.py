"""Causal attention over tokens on a TPU: splash attention, of JAX itself.

It computes no block above the diagonal and keeps nothing of size [T, S].
"""

import jax
import jax.numpy as jnp
from absl import logging
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)
from jaxtyping import Array, Float, Int

from attnres_kernels.depth_attention import chips

LANES = 128  # of a register: blocks, and the head dim inside, are multiples
# Tokens of a block, if they divide T: past 512 the tiles of logits, float32,
# start to crowd out the pipelining of operands in VMEM.
BLOCKS = (512, 384, 256, 128)


def usable(
  q_BTNH: Float[Array, "B T N H"],
  k_BSKH: Float[Array, "B S K H"],
  q_start: int | Int[Array, ""],
) -> bool:
  """Whether tracing is for a TPU and the kernel takes these shapes.

  Where it is for a TPU and the kernel does not, a log line says why.
  """
  if chips.device_kind() is None:
    return False
  tokens, keys = q_BTNH.shape[1], k_BSKH.shape[1]
  if not isinstance(q_start, int) or q_start or tokens != keys:
    why = "the queries are a part of the sequence (mesh.seq > 1)"
  elif tokens % LANES:
    why = f"{tokens} tokens are no multiple of {LANES} (data.seq_len)"
  else:
    return True
  logging.log_first_n(
    logging.WARNING, "Token attention without its TPU kernel: %s.", 1, why
  )
  return False


def attend(
  q_BTNH: Float[Array, "B T N H"],
  k_BTKH: Float[Array, "B T K H"],
  v_BTKH: Float[Array, "B T K H"],
  q_segments_BT: Int[Array, "B T"],
  k_segments_BT: Int[Array, "B T"],
  interpret: bool = False,
) -> Float[Array, "B T N H"]:
  """See `token_attention.attend`, for whole sequences.

  Args:
    q_BTNH, k_BTKH, v_BTKH, q_segments_BT, k_segments_BT: as there; T is a
      multiple of 128.
    interpret: runs the kernel's program on any device, slowly.
  """
  _, tokens, heads, head_dim = q_BTNH.shape
  block = next(size for size in BLOCKS if tokens % size == 0)
  kernel = splash.make_splash_mha(
    masks.MultiHeadMask([masks.CausalMask((tokens, tokens))] * heads),
    block_sizes=splash.BlockSizes(
      block_q=block, block_kv=block,
      block_q_dkv=block, block_kv_dkv=block,
      block_q_dq=block, block_kv_dq=block,
    ),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )  # fmt: skip
  # Zeros in the head dim change nothing; a register has them anyway.
  pad = [(0, 0)] * 3 + [(0, -head_dim % LANES)]
  q, k, v = (
    jnp.pad(x, pad).swapaxes(1, 2)
    for x in (q_BTNH * jnp.asarray(head_dim**-0.5, q_BTNH.dtype),
              k_BTKH, v_BTKH)
  )  # fmt: skip
  segments = splash.SegmentIds(q_segments_BT, k_segments_BT)
  out_BNTH = jax.vmap(kernel)(q, k, v, segments)
  return out_BNTH.swapaxes(1, 2)[..., :head_dim]
