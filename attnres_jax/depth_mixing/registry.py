"""Every residual mechanism by name. A new one is one line here."""

import inspect

from ml_collections import config_dict

from attnres_jax.depth_mixing import (
  attnres,
  denseformer,
  hyper_connections,
  residual,
)
from attnres_jax.depth_mixing.base import DepthMixer
from attnres_jax.errors import unknown_name

MIXERS: dict[str, type[DepthMixer]] = {
  "residual": residual.Residual,
  "full": attnres.FullAttnRes,
  "block": attnres.BlockAttnRes,
  "sliding_window": attnres.SlidingWindowAttnRes,
  "denseformer": denseformer.DenseFormer,
  "mhc": hyper_connections.MHC,
  "mhc_lite": hyper_connections.MHCLite,
}

KNOB = "--config=...:mixer=NAME"


def default_options(name: str) -> dict:
  """The options of a mechanism with their defaults, for `config.mixer`.

  They are the keyword arguments of its constructor, so a default stands in one
  place. An option that may be unset (`int | None = None`) becomes a typed
  placeholder, which a flag can still override.

  Raises:
    UserError: no such mechanism.
  """
  if name not in MIXERS:
    raise unknown_name("mixer", name, MIXERS, KNOB)
  options = {}
  for cls in MIXERS[name].__mro__[:-1]:
    if not issubclass(cls, DepthMixer):
      continue
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
      if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        continue
      if parameter.default is None:
        kind = parameter.annotation.__args__[0]
        options.setdefault(key, config_dict.placeholder(kind))
      elif parameter.default is not inspect.Parameter.empty:
        options.setdefault(key, parameter.default)
  return options


def build(
  name: str, num_sublayers: int, width: int, *, norm_eps: float, **options
) -> DepthMixer:
  """Builds a mechanism.

  Args:
    name: a key of MIXERS.
    num_sublayers: L.
    width: D.
    norm_eps: added to the mean square in the mechanism's own norms.
    **options: the mechanism's options; see `default_options`.

  Raises:
    UserError: no such mechanism, no such option, or a bad value.
  """
  known = default_options(name)
  for key in options:
    if key not in known:
      raise unknown_name(
        f"option of mixer {name!r}", key, known, "--config.mixer.NAME"
      )
  return MIXERS[name](num_sublayers, width, norm_eps=norm_eps, **options)
