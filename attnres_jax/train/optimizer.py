"""AdamW whose weight decay and learning rates go by the role of a variable.

A role is the *type* of the nnx variable (kernel, embedding, norm scale, depth
parameter), never its rank or its name: a stack of L norm scales is a matrix,
and a rule for matrices would decay it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from attnres_jax.depth_mixing.base import DepthParam
from attnres_jax.model.params import Embedding, NormScale


class Role(NamedTuple):
  """How the optimizer treats the variables of one type."""

  name: str
  decayed: bool
  depth: bool  # learning rate times opt.mixer_lr_multiplier


# The first type that a variable is an instance of decides.
ROLES = {
  DepthParam: Role("depth", decayed=False, depth=True),
  NormScale: Role("norm scale", decayed=False, depth=False),
  Embedding: Role("embedding", decayed=True, depth=False),
}
KERNEL = Role("kernel", decayed=True, depth=False)


class Row(NamedTuple):
  """A line of `describe`."""

  path: str
  role: str
  shape: tuple[int, ...]
  decayed: bool
  lr_multiplier: float


def role_of(variable: nnx.Variable) -> Role:
  """The role of a variable.

  Raises:
    TypeError: a type that nobody has decided about.
  """
  for kind, role in ROLES.items():
    if isinstance(variable, kind):
      return role
  if type(variable) is nnx.Param:
    return KERNEL
  raise TypeError(
    f"got a variable of type {type(variable).__name__}: expected nnx.Param or"
    f" one of {', '.join(kind.__name__ for kind in ROLES)}. Give the type a"
    " role in attnres_jax/train/optimizer.py."
  )


def roles(params: nnx.State) -> list[Role]:
  """The role of every leaf, in the order of `jax.tree.leaves(params)`."""
  variables = jax.tree.leaves(
    params, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  return [role_of(variable) for variable in variables]


def describe(params: nnx.State, opt) -> list[Row]:
  """One row per parameter: what the optimizer does with it.

  Args:
    params: of a model, arrays or shapes.
    opt: the config group `opt`.
  """
  return [
    Row(
      path=".".join(map(str, path)),
      role=role.name,
      shape=tuple(variable.get_value().shape),
      decayed=role.decayed and opt.weight_decay > 0,
      lr_multiplier=opt.mixer_lr_multiplier if role.depth else 1.0,
    )
    for path, variable in nnx.to_flat_state(params)
    for role in [role_of(variable)]
  ]


def schedule(opt, steps: int) -> optax.Schedule:
  """Learning rate by step: linear warmup, then a cosine.

  lr(s) = peak * (s + 1) / warmup               for s < warmup
  lr(s) = peak * (r + (1 - r) * (1 + cos(pi * p)) / 2), r = min_lr_ratio,
          p = (s + 1 - warmup) / (steps - warmup)      afterwards

  so step 0 already learns, and the last step has exactly peak * r.

  Args:
    opt: the config group `opt`.
    steps: optimizer steps of the whole run.
  """
  warmup, peak, floor = opt.warmup_steps, opt.lr, opt.min_lr_ratio

  def lr(step):
    done = jnp.asarray(step, jnp.float32) + 1
    progress = jnp.clip((done - warmup) / max(steps - warmup, 1), 0, 1)
    cosine = floor + (1 - floor) * 0.5 * (1 + jnp.cos(math.pi * progress))
    return peak * jnp.where(
      done < warmup, done / max(warmup, 1), cosine
    )  # at done == warmup both are 1

  return lr


def global_norm(tree: Any) -> jax.Array:
  """The L2 norm over all leaves, squared and summed in float32."""
  return jnp.sqrt(
    sum(
      jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)
    )
  )


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
  """Scales all gradients down so that their norm is at most `limit`; 0: off.

  Unlike optax's, the norm is float32 whatever the gradients are, so it does
  not depend on how they are split over devices.
  """
  if not limit:
    return optax.identity()

  def update(updates, params):
    del params
    norm = global_norm(updates)
    scale = jnp.where(norm > limit, limit / norm, 1.0)
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), updates)

  return optax.stateless(update)


def build(opt, steps: int, params: nnx.State) -> optax.GradientTransformation:
  """The optimizer of a run.

  Args:
    opt: the config group `opt`.
    steps: optimizer steps of the whole run.
    params: arrays or shapes; only their roles matter.
  """
  role_list = roles(params)

  def decay_and_multiply(updates, params):
    leaves, treedef = jax.tree.flatten(updates)
    scaled = [
      (u + (opt.weight_decay if role.decayed else 0.0) * p)
      * (opt.mixer_lr_multiplier if role.depth else 1.0)
      for u, p, role in zip(
        leaves, jax.tree.leaves(params), role_list, strict=True
      )
    ]
    return jax.tree.unflatten(treedef, scaled)

  return optax.chain(
    clip_by_global_norm(opt.clip_norm),
    optax.scale_by_adam(opt.b1, opt.b2, opt.eps, mu_dtype=jnp.float32),
    optax.stateless(decay_and_multiply),
    optax.scale_by_learning_rate(schedule(opt, steps)),
  )
