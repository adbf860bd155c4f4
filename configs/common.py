"""What every config file shares: the typed argument string."""

from attnres_jax.errors import unknown_name


def parse_arg(arg: str | None, **defaults):
  """Parses `key=value,key=value` into a dict, typed by the defaults.

  Args:
    arg: the text after the colon of `--config=file.py:arg`, or None. The first
      item may be a bare value: it then sets the first default.
    **defaults: the known keys with their default values; a value's type (str,
      int, float or bool) is the type that the text is parsed to.

  Returns:
    A dict with every key of `defaults`.

  Raises:
    ValueError: unknown key, or a value that is not of the default's type.
  """
  parsed = dict(defaults)
  first = next(iter(defaults))
  for position, item in enumerate(arg.split(",") if arg else []):
    key, equals, text = item.partition("=")
    if not equals:
      if position == 0 and key not in defaults:
        key, text = first, item
      elif isinstance(defaults.get(key), bool):
        text = "true"
      else:
        raise ValueError(
          f"config argument {item!r}: expected key=value, with a key out of"
          f" {', '.join(defaults)}."
        )
    if key not in defaults:
      raise unknown_name(
        "config argument", key, defaults, "--config=FILE:KEY=VALUE"
      )
    parsed[key] = _parse(key, text, type(defaults[key]))
  return parsed


def _parse(key: str, text: str, kind: type):
  if kind is bool:
    if text.lower() not in ("true", "false"):
      raise ValueError(
        f"config argument {key}={text!r}: expected true or false."
      )
    return text.lower() == "true"
  try:
    return kind(text)
  except ValueError:
    raise ValueError(
      f"config argument {key}={text!r}: expected {kind.__name__}."
    ) from None
