"""Every mistake on the command line is one line on standard error, exit 2."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest
from absl import flags, logging

from attnres_jax import cli
from attnres_jax.errors import UserError
from attnres_jax.train.errors import NonFiniteLossError
from tests.conftest import REPO


@pytest.fixture
def parse(monkeypatch, tmp_path):
  """parse(*words) -> (config, workdir): like scripts/train.py, but afresh."""
  monkeypatch.chdir(REPO)
  # Config files are all loaded into this module, over what is in it.
  monkeypatch.delitem(sys.modules, "config_config", raising=False)

  def parse(*words, default="configs/train.py"):
    argv = ["train.py", *words]
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(cli, "_defaults", {})
    workdir = flags.DEFINE_string(
      "workdir", None, "", flag_values=values, module_name="train.py"
    )
    values.register_key_flag_for_module("train.py", values["workdir"])
    flags.DEFINE_integer("verbosity", -1, "", flag_values=values)
    config = cli.define_config(default, "The config.")
    assert cli.parse_flags(argv) == ["train.py"]
    return config.value, workdir.value

  return parse


@pytest.fixture
def error_of(parse, capsys):
  """error_of(*words) -> the line that is printed."""

  def error_of(*words, **kwargs):
    with pytest.raises(SystemExit) as error:
      parse(*words, **kwargs)
    assert error.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err
    return printed.err

  return error_of


@pytest.mark.fast
def test_values_are_parsed(parse):
  config, workdir = parse(
    "--config=configs/train.py:mixer=full,size=micro", "--workdir", "runs/x",
    "--config.run.steps=12", "--config.opt.lr", "1e-3",
    "--noconfig.run.progress", "--config.data.path=/a=b",
  )  # fmt: skip
  assert config.mixer.name == "full" and config.run.steps == 12
  assert config.opt.lr == 1e-3 and not config.run.progress
  assert config.data.path == "/a=b" and workdir == "runs/x"
  assert config.is_locked
  assert flags.FLAGS["verbosity"].value == logging.WARNING


@pytest.mark.fast
def test_the_default_config_takes_overrides(parse):
  config, _ = parse("--config.mixer.block_size=3")
  assert config.mixer.block_size == 3 and config.model.layers == 8


@pytest.mark.fast
@pytest.mark.parametrize(
  "words, parts",
  [
    ("--config.run.steps=1e5", ["--config.run.steps=1e5", "integer: 100000"]),
    ("--config.run.steps=10.0", ["expected an integer: 10."]),
    ("--config.run.steps 2.5", ["--config.run.steps=2.5", "an integer."]),
    ("--config.run.steps", ["--config.run.steps", "an integer"]),
    ("--config.opt.lr=abc", ["--config.opt.lr=abc", "a number"]),
    ("--config.run.progress=maybe", ["--config.run.progress=maybe", "true"]),
    ("--config.mixer.block_size=x", ["--config.mixer.block_size=x"]),
    ("--config.opt.lrr=1", ["'opt.lrr'", "Did you mean --config.opt.lr?"]),
    ("--config.opts.lr=1", ["'opts.lr'", "Did you mean --config.opt.lr?"]),
    ("--config.lr=1", ["'lr'", "Did you mean --config.opt.lr?"]),
    ("--config.opt=1", ["--config.opt=1", "a group"]),
    ("--config.opt.lr=1e-3 --config.run.step=2", ["--config.run.steps?"]),
    ("--config=configs/train.py:mixer=blok", ["'blok'", "mean 'block'"]),
    ("--config=configs/train.py:size=big", ["'big'", "micro"]),
    ("--config=configs/train.py:siez=tiny", ["'siez'", "mean 'size'"]),
    ("--config=configs/trian.py", ["configs/train.py?"]),
    ("--config=configs/trian.py --config.opt.lr=1", ["configs/train.py?"]),
    ("--config=configs", ["--config=configs"]),
    ("--wrokdir=x", ["--wrokdir", "Did you mean --workdir?"]),
    ("extra", ["'extra'"]),
  ],
)
def test_mistakes(error_of, words, parts):
  message = error_of(*words.split())
  for part in parts:
    assert part in message


@pytest.mark.fast
@pytest.mark.parametrize(
  "code, parts",
  [
    ("def get_config(:\n", ["config.py:1", "syntax"]),
    ("import no_such_module\n", ["config.py:1", "no_such_module"]),
    ("def get_config(): return 1 / 0\n", ["config.py:1", "ZeroDivisionError"]),
    ("x = 1\n", ["get_config"]),
  ],
)
def test_mistakes_in_a_config_file(error_of, tmp_path, code, parts):
  (tmp_path / "config.py").write_text(code)
  message = error_of(f"--config={tmp_path / 'config.py'}")
  for part in parts:
    assert part in message


@pytest.mark.fast
def test_exit_codes_of_main(capsys):
  def fail_with(error):
    def main(argv):
      raise error

    return cli._call(main, ["train.py"])

  assert cli._call(lambda argv: 143, []) == 143
  assert fail_with(UserError("got this: expected that.")) == 2
  assert capsys.readouterr().err == "error: got this: expected that.\n"
  assert fail_with(NonFiniteLossError("loss", float("nan"), 7, 5)) == 1
  message = capsys.readouterr().err
  assert "got loss nan at step 7" in message and "step 5 is saved" in message
  with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
    fail_with(ZeroDivisionError())


def start(*words, workdir: pathlib.Path):
  return subprocess.Popen(
    [
      *(sys.executable, "-m", "scripts.train"),
      "--config=configs/train.py:mixer=residual,size=micro",
      "--config.model.layers=1",
      *words,
      f"--workdir={workdir}",
    ],
    cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def test_the_script(tmp_path, monkeypatch):
  """From SIGTERM to the end, and the result once more."""
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(REPO / ".cache" / "jax"))
  workdir, words = tmp_path / "run", ["--config.run.steps=300"]
  process = start(*words, workdir=workdir)
  metrics = workdir / "metrics.jsonl"
  while not (metrics.exists() and '"step": 10,' in metrics.read_text()):
    assert process.poll() is None, process.communicate()
    time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate()
  assert process.returncode == 143, err
  assert "the same command continues" in out and "Traceback" not in err

  # Fewer evaluations and checkpoints: harmless, and faster.
  rarely = [
    "--config.run.eval_every=1000",
    "--config.run.checkpoint_every=1000",
  ]
  process = start(*words, *rarely, workdir=workdir)
  out, err = process.communicate()
  assert process.returncode == 0, err
  assert "continuing after step" in out and "step 300: validation" in out

  # Other flags are refused; the folder stays as it is.
  before = {path: path.stat().st_mtime for path in workdir.rglob("*")}
  process = start("--config.run.steps=301", workdir=workdir)
  out, err = process.communicate()
  assert process.returncode == 2 and out == ""
  assert err.startswith("error: ") and err.count("\n") == 1, err
  assert before == {path: path.stat().st_mtime for path in workdir.rglob("*")}
