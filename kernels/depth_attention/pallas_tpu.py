"""TPU kernels of depth attention; see api.py for the two functions."""

import jax.numpy as jnp

from attnres_kernels.depth_attention.pallas_tpu_attend import attend
from attnres_kernels.depth_attention.pallas_tpu_merge import merge

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))

__all__ = ["DTYPES", "attend", "merge"]
