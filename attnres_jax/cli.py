"""What the scripts share: flags with good errors, exit codes, compile cache.

Exit codes of every script: 0 done, 1 the run failed, 2 a flag, config, data or
folder is wrong (one line on standard error, nothing written), 130 Ctrl-C and
143 SIGTERM (128 + the signal's number: saved, but not finished).
"""

import difflib
import functools
import json
import os
import pathlib
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from attnres_jax import provenance
from attnres_jax.data.corpora import cache_folder
from attnres_jax.errors import UserError
from attnres_jax.parallel import distributed
from attnres_jax.train.errors import NonFiniteLossError
from attnres_jax.train.workdir import config_values, flatten

HELP_FLAGS = ("--help", "--helpshort", "--helpfull", "-help", "-?", "-h")
EXPECTED = {
  int: "an integer",
  float: "a number",
  bool: "true or false",
  str: "text",
}

_defaults: dict[str, str] = {}
flags.disclaim_key_flags()  # a flag defined here is its caller's, for --help


def define_config(default: str, help_string: str) -> flags.FlagHolder:
  """Defines the flag --config, FILE:ARGUMENTS.

  The default is applied when flags are parsed: ml_collections would load it
  right here, where an error in an override ends in a traceback.
  """
  _defaults["config"] = default
  return config_flags.DEFINE_config_file(
    "config",
    None,
    f"{help_string} Default: {default}",
    flag_values=flags.FLAGS,
    lock_config=True,
  )


def define_processes() -> Callable[..., bool]:
  """Defines the flags with which several processes find each other.

  Returns:
    join(config, **facts) -> whether there are others; call it before the first
    use of JAX. Facts, such as workdir, are compared along with the config and
    the code.
  """
  coordinator = flags.DEFINE_string(
    "coordinator", None,
    "HOST:PORT of process 0, where all processes meet. Only with several"
    " processes, and not needed on Cloud TPU.",
  )  # fmt: skip
  count = flags.DEFINE_integer(
    "num_processes", None, "With --coordinator: how many processes there are."
  )
  index = flags.DEFINE_integer(
    "process_id", None, "With --coordinator: which one this is, from 0."
  )
  timeout = flags.DEFINE_integer(
    "init_timeout", distributed.DEFAULT_TIMEOUT_S,
    "Seconds to wait for the other processes.",
  )  # fmt: skip

  def join(config: ConfigDict, **facts: str | None) -> bool:
    return distributed.join(
      coordinator.value, count.value, index.value, timeout.value,
      _facts(config, facts),
    )  # fmt: skip

  return join


def _facts(config: ConfigDict, more: dict[str, str | None]) -> dict[str, str]:
  """What has to be the same in all processes of a run."""
  values = flatten(config_values(config))
  versions = provenance.versions()
  return {
    "commit": provenance.commit(),
    "code hash": provenance.code_hash(),
    "Python": platform.python_version(),
    **{f"{name} version": str(found) for name, found in versions.items()},
    **{f"--config.{key}": json.dumps(value) for key, value in values.items()},
    **{f"--{key}": str(value) for key, value in more.items()},
  }


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
  """Parses the flags, calls `main` and exits with what it returns.

  Args:
    main: takes sys.argv without the flags (the program's name only), returns
      the exit code (None: 0).
  """
  app.run(functools.partial(_call, main), flags_parser=parse_flags)


def _call(main, argv: list[str]) -> int | None:
  use_compilation_cache()
  try:
    return main(argv)
  except NonFiniteLossError as error:
    return _print_error(error, 1)
  except UserError as error:
    return _print_error(error, 2)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return _print_error(
      f"out of device memory: {_first_line(error)} Set a smaller"
      " --config.data.batch_size, a larger --config.opt.accumulate or"
      " --config.model.remat=block.",
      1,
    )
  except KeyboardInterrupt:
    print("\nInterrupted; not saved.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)  # at once: `sys.exit` would wait for background threads


def use_compilation_cache() -> None:
  """Keeps compiled programs, so that the same run starts faster next time.

  In $JAX_COMPILATION_CACHE_DIR, else in the folder `xla` of this project's
  cache (~/.cache/attnres_jax).
  """
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses absl and config flags. Exits with code 2 and one line if it cannot.

  Args:
    argv: the program's name and the command line.

  Returns:
    The program's name.
  """
  argv = ["--help" if word == "-h" else word for word in argv]
  for name, text in _defaults.items():
    if _last_value(argv, name) is None:
      argv.insert(1, f"--{name}={text}")
  try:
    rest = flags.FLAGS(argv)
    for _, flag in _config_flags():
      if flag.value is not None:
        _ = flag.value.keys  # raises if the file could not be read
    if len(rest) > 1:
      raise UserError(
        f"got argument {rest[1]!r}: expected flags only, --name=value."
      )
  except SystemExit as error:  # absl leaves --help with 1, as if it had failed
    asked = any(word.split("=")[0] in HELP_FLAGS for word in argv)
    sys.exit(0 if asked else error.code)
  except Exception as error:  # a config file is code: it can raise anything
    sys.exit(_print_error(_explain(error, argv), 2))
  if flags.FLAGS["verbosity"].using_default_value:
    flags.FLAGS.verbosity = logging.WARNING
  return rest


def _print_error(error: Exception | str, code: int) -> int:
  text = " ".join(str(error).split())
  print(f"error: {text}", file=sys.stderr)
  return code


def _config_flags() -> Iterator[tuple[str, Any]]:
  for name in flags.FLAGS:
    flag = flags.FLAGS[name]
    if config_flags.is_config_flag(flag):
      yield name, flag


def _explain(error: Exception, argv: Sequence[str]) -> str:
  """One line about an error of `flags.FLAGS(argv)`."""
  chain = [error]
  while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
    chain.append(inner)
  root = chain[-1]
  for link in chain:
    if isinstance(link, flags.UnrecognizedFlagError):
      return _unknown_flag(link.flagname)
  for name, flag in _config_flags():
    text = _last_value(argv, name)
    if text is None:
      continue
    path = pathlib.Path(text.split(":", 1)[0])
    if any(isinstance(link, OSError) for link in chain) and not path.is_file():
      return _no_config_file(name, path)
    frames = traceback.extract_tb(root.__traceback__)
    if isinstance(root, SyntaxError):
      return (
        f"{root.filename}:{root.lineno}: {root.msg}, in the file of --{name}"
      )
    if isinstance(root, UserError):
      break
    try:
      config = flag.parser.parse(text)
    except Exception:
      # Its own `raise ValueError(...)` is meant for the user as it is.
      if isinstance(root, ValueError):
        break
      where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
      return f"{where}{type(root).__name__}: {root}, from --{name}={text}"
    for key, value in _overrides(argv, name):
      problem = _check_override(config, name, key, value)
      if problem:
        return problem
  return str(root) if isinstance(root, UserError | ValueError) else str(error)


def _last_value(argv: Sequence[str], name: str) -> str | None:
  """The text given to a flag, as --name=text or --name text."""
  found = None
  for word, following in zip(argv, [*argv[1:], None], strict=True):
    given, equals, text = word.partition("=")
    if given in (f"--{name}", f"-{name}"):
      found = text if equals else following
  return found


def _overrides(
  argv: Sequence[str], name: str
) -> Iterator[tuple[str, str | None]]:
  """(key, text) of every --name.key=text; None: no text follows."""
  pattern = re.compile(rf"--?(no)?{re.escape(name)}\.([^=]*)(=(.*))?", re.S)
  for word, following in zip(argv, [*argv[1:], None], strict=True):
    match = pattern.fullmatch(word)
    if match:
      no, key, equals, text = match.groups()
      yield key, "false" if no else text if equals else following


def _check_override(
  config: ConfigDict, name: str, key: str, text: str | None
) -> str | None:
  """What is wrong with --name.key=text, if anything is."""
  types = dict(_leaves(config))
  shown = f"--{name}.{key}" + ("" if text is None else f"={text}")
  if key not in types:
    inside = [known for known in types if known.startswith(key + ".")]
    if inside:
      return (
        f"got {shown}, but that is a group of values: expected one of them,"
        f" such as --{name}.{inside[0]}."
      )
    group = key.rsplit(".", 1)[0] + "."
    there = [known for known in types if known.startswith(group)]
    expected = ", ".join(there or config)
    return (
      f"unknown config key {key!r}: expected one of {expected}."
      + _did_you_mean(key, there or types, f"--{name}.")
    )
  kind = types[key]
  try:
    if text is None and kind is not bool:
      raise ValueError
    if kind is bool and text is not None:
      flags.BooleanParser().parse(text)
    elif kind is int:
      flags.IntegerParser().parse(text)
    elif kind is float:
      flags.FloatParser().parse(text)
  except ValueError:
    return f"got {shown}: expected {EXPECTED[kind]}{_as_integer(kind, text)}."
  return None


def _as_integer(kind: type, text: str | None) -> str:
  """A hint for 1e5 or 10.0 where an integer is expected."""
  try:
    number = float(text or "")
    return f": {int(number)}" if kind is int and number.is_integer() else ""
  except ValueError:
    return ""


def _leaves(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, type]]:
  for key in config:
    value = config[key]
    if isinstance(value, ConfigDict):
      yield from _leaves(value, f"{prefix}{key}.")
    else:
      yield prefix + key, config.get_type(key)


def _did_you_mean(got: str, known: Any, prefix: str) -> str:
  near = difflib.get_close_matches(got, list(known), n=1, cutoff=0.4)
  if not near:  # the right name in no group, or in the wrong one
    tails = {name.rsplit(".", 1)[-1]: name for name in known}
    tail = difflib.get_close_matches(got.rsplit(".", 1)[-1], list(tails), n=1)
    near = [tails[name] for name in tail]
  return f" Did you mean {prefix}{near[0]}?" if near else ""


def _unknown_flag(name: str) -> str:
  shown = [
    flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])
  ]
  hint = _did_you_mean(name, shown, "--")
  return f"unknown flag --{name}.{hint} --help lists the flags."


def _no_config_file(flag: str, path: pathlib.Path) -> str:
  there = [str(p) for p in pathlib.Path("configs").glob("*.py")]
  hint = _did_you_mean(str(path), there, f"--{flag}=")
  return (
    f"got --{flag}={path}: expected a config file, and there is none of that"
    f" name in {pathlib.Path.cwd()}.{hint}"
  )


def _first_line(error: Exception) -> str:
  lines = str(error).strip().splitlines()
  return lines[0][:200] if lines else type(error).__name__
