"""Checks of a whole config that need neither data nor devices."""

import jax

from attnres_jax.depth_mixing import registry
from attnres_jax.depth_mixing.base import REMAT
from attnres_jax.errors import UserError, unknown_name

DTYPES = ("float32", "bfloat16")
SOURCES = ("sotu", "pycode", "files", "hf")
POSITIVE = {
  "data": ("vocab_size", "seq_len", "batch_size", "eval_sequences", "prefetch"),
  "model": ("layers", "width", "heads", "kv_heads", "mlp_hidden", "vocab_size"),
  "opt": ("accumulate",),
  "run": (
    "steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints",
  ),
}  # fmt: skip


def validate(config) -> None:
  """Checks a config of configs/train.py.

  Raises:
    UserError: the first value that is wrong; its message names the flag.
  """
  for group, keys in POSITIVE.items():
    for key in keys:
      if config[group][key] < 1:
        raise _bad(f"{group}.{key}", config[group][key], "an integer >= 1")
  model, data, opt = config.model, config.data, config.opt
  if model.head_dim < 0:
    raise _bad("model.head_dim", model.head_dim, "an integer >= 0")
  if not model.head_dim and model.width % model.heads:
    raise _bad(
      "model.heads", model.heads,
      f"a divisor of model.width {model.width} (or set model.head_dim)",
    )  # fmt: skip
  if model.heads % model.kv_heads:
    raise _bad(
      "model.kv_heads",
      model.kv_heads,
      f"a divisor of model.heads {model.heads}",
    )
  head_dim = model.head_dim or model.width // model.heads
  if model.rope_theta and head_dim % 2:
    raise _bad(
      "model.head_dim", head_dim,
      "an even number for RoPE (or --config.model.rope_theta=0.0)",
    )  # fmt: skip
  for key in ("rope_theta", "init_std"):
    if model[key] < 0:
      raise _bad(f"model.{key}", model[key], "a number >= 0")
  if model.norm_eps <= 0:
    raise _bad("model.norm_eps", model.norm_eps, "a number > 0")
  if model.dtype not in DTYPES:
    raise unknown_name("dtype", model.dtype, DTYPES, "--config.model.dtype")
  if model.remat not in REMAT:
    raise unknown_name("remat", model.remat, REMAT, "--config.model.remat")
  if data.source not in SOURCES:
    raise unknown_name(
      "data source", data.source, SOURCES, "--config.data.source"
    )
  if not 0 < data.val_percent < 100:
    raise _bad("data.val_percent", data.val_percent, "1 to 99 (per cent)")
  for key in ("lr", "weight_decay", "clip_norm", "z_loss",
              "mixer_lr_multiplier", "min_lr_ratio"):  # fmt: skip
    if not 0 <= opt[key] < float("inf"):
      raise _bad(f"opt.{key}", opt[key], "a finite number >= 0")
  if opt.warmup_steps < 0 or opt.warmup_steps > config.run.steps:
    raise _bad(
      "opt.warmup_steps", opt.warmup_steps,
      f"0 to run.steps {config.run.steps}",
    )  # fmt: skip
  run = config.run
  if run.profile_steps < 0:
    raise _bad("run.profile_steps", run.profile_steps, "an integer >= 0")
  if run.profile_steps and not 1 <= run.profile_start <= run.steps:
    raise _bad(
      "run.profile_start", run.profile_start, f"1 to run.steps {run.steps}"
    )
  if data.batch_size % opt.accumulate:
    raise _bad(
      "opt.accumulate", opt.accumulate,
      f"a divisor of data.batch_size {data.batch_size}",
    )  # fmt: skip
  # The mixer checks its own options; nothing is allocated.
  jax.eval_shape(
    lambda: registry.build(
      num_sublayers=2 * model.layers, width=model.width,
      norm_eps=model.norm_eps, **config.mixer,
    ).num_sublayers
  )  # fmt: skip


def _bad(key: str, got, expected: str) -> UserError:
  return UserError(
    f"got {key} {got}: expected {expected}. Set it with --config.{key}."
  )
