"""Config errors: one line that says got, expected and which flag."""

import pytest

from attnres_jax.config import validate
from attnres_jax.errors import UserError
from configs.train import SIZES, get_config

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_valid(size):
  validate(get_config(f"size={size}"))


@pytest.mark.parametrize(
  ("key", "value", "message"),
  [
    ("model.heads", 5, "got model.heads 5: expected a divisor of model.width"),
    ("model.kv_heads", 3, "expected a divisor of model.heads 4"),
    ("model.head_dim", 7, "expected an even number for RoPE"),
    ("model.layers", 0, "expected an integer >= 1"),
    ("model.dtype", "float16", "Did you mean 'bfloat16'"),
    ("model.remat", "blocks", "Did you mean 'block'"),
    ("model.norm_eps", 0.0, "expected a number > 0"),
    ("model.rope_theta", -1.0, "expected a number >= 0"),
    ("data.source", "sotus", "Did you mean 'sotu'"),
    ("data.val_percent", 0, "expected 1 to 99"),
    ("data.batch_size", 0, "expected an integer >= 1"),
    ("opt.lr", float("nan"), "expected a finite number >= 0"),
    ("opt.lr", -1.0, "expected a finite number >= 0"),
    ("opt.accumulate", 3, "expected a divisor of data.batch_size"),
    ("opt.warmup_steps", 10_000, "expected 0 to run.steps"),
    ("run.steps", 0, "expected an integer >= 1"),
    ("mixer.block_size", 0, "got block_size 0"),
    ("mixer.heads", 7, "got 7 depth heads for width 64"),
  ],
)
def test_bad_values(key, value, message):
  c = get_config()
  group, name = key.split(".")
  with c.unlocked():
    c[group][name] = value
  with pytest.raises(UserError, match=message) as error:
    validate(c)
  assert "\n" not in str(error.value)
  assert f"--config.{group}." in str(error.value)


@pytest.mark.parametrize(
  ("arg", "message"),
  [
    ("mixer=blok", "Did you mean 'block'"),
    ("size=tony", "Did you mean 'tiny'"),
    ("mixr=block", "Did you mean 'mixer'"),
    ("mixer=block,tiny", "expected key=value"),
  ],
)
def test_bad_arguments(arg, message):
  with pytest.raises(ValueError, match=message):
    get_config(arg)


def test_first_argument_may_be_bare():
  assert get_config("mhc,size=micro").mixer.name == "mhc"
