"""Runs that end early continue exactly; runs that cannot work say so."""

import json
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from attnres_jax import data
from attnres_jax.errors import UserError
from attnres_jax.train import loop
from tests.conftest import REPO
from tests.train.conftest import (
  assert_same,
  at_step,
  lines,
  micro_config,
  saved_state,
  send,
)


@pytest.fixture
def train(config, program, dataset, tmp_path):
  """train(program=..., workdir=...) of the shared micro program."""

  def train(program=program, workdir=tmp_path / "run", config=config, **kwargs):
    return loop.train(config, workdir, program, dataset, **kwargs)

  return train


@pytest.fixture(scope="session")
def reference(program, dataset, tmp_path_factory):
  """(summary, folder) of an uninterrupted run of 8 steps."""
  folder = tmp_path_factory.mktemp("reference")
  return loop.train(micro_config(), folder, program, dataset), folder


def assert_equals_reference(reference, summary, folder, program, dataset):
  expected, reference_folder = reference
  assert lines(folder) == lines(reference_folder)
  for name in ("val_loss", "val_bpb", "steps", "tokens", "interrupted"):
    assert getattr(summary, name) == getattr(expected, name)
  assert_same(
    saved_state(program, dataset, folder, 8),
    saved_state(program, dataset, reference_folder, 8),
  )


def test_a_run(reference, config, dataset):
  summary, folder = reference
  written = lines(folder)
  train_lines = [line for line in written if "loss" in line]
  assert [line["step"] for line in train_lines] == list(range(1, 9))
  assert [x["step"] for x in written if "val_loss" in x] == [4, 8]
  assert train_lines[0]["loss"] == pytest.approx(np.log(2048), rel=0.02)
  assert summary.val_loss == written[-1]["val_loss"] < train_lines[0]["loss"]
  assert summary.steps == 8 and summary.tokens == 8 * 4 * 32
  assert not summary.interrupted and summary.wall_s > 0
  assert json.loads((folder / "config.json").read_text()) == config.to_dict()
  environment = json.loads((folder / "environment.json").read_text())
  assert environment["packages"]["jax"] == jax.__version__
  assert environment["device_count"] == jax.device_count()
  names = {path.name for path in folder.iterdir()}
  assert names == {
    ".lock", "checkpoints", "config.json", "environment.json", "metrics.jsonl",
    "summary.json",
  }  # fmt: skip


def test_validation_is_exact(reference, program, dataset):
  """Against float64 over all targets, weighing each target the same."""
  summary, folder = reference
  state, _ = saved_state(program, dataset, folder, 8)
  nll = targets = num_bytes = 0.0
  for batch in dataset.eval_batches():
    sums = program.eval_step(state, batch)
    nll += float(sums.nll)
    for target, counts in zip(
      batch["targets"].flat, batch["mask"].flat, strict=True
    ):
      targets += int(counts)
      num_bytes += float(counts * dataset.tokenizer.token_bytes[target])
  assert summary.val_loss == pytest.approx(nll / targets, rel=1e-6)
  bits = nll / np.log(2)
  assert summary.val_bpb == pytest.approx(bits / num_bytes, rel=1e-6)


@pytest.mark.parametrize("step", [3, 4])  # 4: where a checkpoint is made anyway
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_by_a_signal(
  train, reference, program, dataset, tmp_path, step, number
):
  before = signal.getsignal(number)
  summary = train(at_step(program, step, send(number)))
  assert signal.getsignal(number) is before
  assert summary.interrupted and summary.signal == number
  assert summary.steps == step
  assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()
  summary = train()
  assert_equals_reference(
    reference, summary, tmp_path / "run", program, dataset
  )


def test_interrupted_in_every_session(
  train, reference, program, dataset, tmp_path
):
  for step in range(1, 8):
    summary = train(at_step(program, 1, send(signal.SIGTERM)))
    assert summary.steps == step
  summary = train()
  assert_equals_reference(
    reference, summary, tmp_path / "run", program, dataset
  )


def test_interrupted_in_the_evaluation(
  train, reference, program, dataset, tmp_path, monkeypatch
):
  """It is given up, the state saved, and the evaluation done next time."""
  evaluate = loop.evaluate
  for step in (4, 8):
    with monkeypatch.context() as patch:

      def interrupted(program, state, *args, step=step):
        if int(state.step) == step:
          signal.raise_signal(signal.SIGTERM)
        return evaluate(program, state, *args)

      patch.setattr(loop, "evaluate", interrupted)
      summary = train()
    assert summary.interrupted and summary.steps == step
    assert len([x for x in lines(tmp_path / "run") if "val_loss" in x]) == (
      step // 4 - 1
    )
  summary = train()
  assert_equals_reference(
    reference, summary, tmp_path / "run", program, dataset
  )


def test_killed(train, reference, program, dataset, tmp_path):
  """Steps after the last checkpoint are done again, their lines dropped."""

  class Killed(Exception):
    pass

  def kill():
    raise Killed

  with pytest.raises(Killed):
    train(at_step(program, 3, kill))  # before there is any checkpoint
  with pytest.raises(Killed):
    train(at_step(program, 7, kill))
  path = tmp_path / "run" / "metrics.jsonl"
  assert max(line["step"] for line in lines(path.parent)) in (5, 6)
  with path.open("a") as file:
    file.write('{"step": 6, "los')  # killed while writing
  summary = train()
  assert_equals_reference(
    reference, summary, tmp_path / "run", program, dataset
  )


KILLED_WHILE_SAVING = """
import os, signal, sys
from attnres_jax.train import checkpoint, loop
from tests.train.conftest import micro_config
jax.config.update("jax_compilation_cache_dir", ".cache/jax")
def save(self, step, *args, save=checkpoint.Checkpoints.save):
  save(self, step, *args)
  if step == 8:
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint.Checkpoints.save = save
loop.train(micro_config(), sys.argv[1])
"""


def test_killed_while_saving(train, reference, program, dataset, tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", "import jax\n" + KILLED_WHILE_SAVING,
     str(tmp_path / "run")],
    cwd=REPO, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == -signal.SIGKILL, done.stderr
  there = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
  assert "4" in there and "8" not in there, there
  summary = train()
  assert_equals_reference(
    reference, summary, tmp_path / "run", program, dataset
  )


def test_a_second_ctrl_c_exits_at_once(train, program):
  def twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)

  before = signal.getsignal(signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    train(at_step(program, 2, twice))
  assert signal.getsignal(signal.SIGINT) is before


def test_trains_outside_the_main_thread(train):
  found = []
  thread = threading.Thread(target=lambda: found.append(train()))
  thread.start()
  thread.join()
  assert found[0].steps == 8


def test_a_finished_run_is_not_run_again(reference, config, monkeypatch):
  summary, folder = reference
  monkeypatch.setattr(loop, "compile_program", None)
  monkeypatch.setattr(data, "load", None)
  said = []
  assert loop.train(config, folder, say=said.append) == summary
  assert str(folder) in said[0]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_loss_that_is_not_finite_stops_the_run(
  train, program, dataset, tmp_path, name
):
  bad = at_step(program, 6, lambda: None, {name: np.float32("nan")})
  with pytest.raises(loop.NonFiniteLossError, match=f"{name} nan at step 6"):
    train(bad)
  assert lines(tmp_path / "run")[-1]["step"] == 5
  state, _ = saved_state(program, dataset, tmp_path / "run", 4)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_poisoned_state_is_never_saved(train, program, tmp_path):
  """The loss goes bad in the very step that a checkpoint is due at."""
  bad = at_step(program, 4, lambda: None, {"loss": np.float32("inf")})
  with pytest.raises(loop.NonFiniteLossError, match="nothing was saved"):
    train(bad)
  assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_validation_loss_that_is_not_finite(train, monkeypatch, tmp_path):
  monkeypatch.setattr(
    loop, "evaluate", lambda *_: dict(val_loss=float("nan"), val_bpb=1.0)
  )
  with pytest.raises(loop.NonFiniteLossError, match="val_loss nan at step 4"):
    train()
  assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_another_config_is_refused(train, reference, tmp_path, program, config):
  train(at_step(program, 2, send(signal.SIGTERM)))
  before = sorted(tmp_path.rglob("*"))
  config.opt.lr = 0.5
  config.mixer.block_size = 2
  config.run.log_every = 7  # harmless: not named
  with pytest.raises(UserError) as error:
    train()
  message = str(error.value)
  assert "\n" not in message and "--workdir" in message
  assert "opt.lr=0.5 (that run: 0.01)" in message
  assert "mixer.block_size=2 (that run: None)" in message
  assert "log_every" not in message
  assert sorted(tmp_path.rglob("*")) == before


def test_harmless_values_may_change(
  train, program, reference, dataset, tmp_path, config
):
  train(at_step(program, 2, send(signal.SIGTERM)))
  config.run.keep_checkpoints = 5
  config.run.checkpoint_every = 3
  config.data.prefetch = 1
  summary = train()
  assert_equals_reference(
    reference, summary, tmp_path / "run", program, dataset
  )
  there = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
  assert there == {"2", "3", "6", "8"}
  written = json.loads((tmp_path / "run" / "config.json").read_text())
  assert written["run"]["checkpoint_every"] == 3


def test_seeds_differ_and_share_a_program(program, dataset, tmp_path):
  config = micro_config()
  config.run.seed = 1
  config.run.eval_every = config.run.checkpoint_every = 100
  other = data.load(config.data, seed=1)
  one = loop.train(config, tmp_path / "1", program, other)
  again = loop.train(config, tmp_path / "again", program, other)
  assert lines(tmp_path / "1") == lines(tmp_path / "again")
  assert one.val_loss == again.val_loss
  config.run.seed = 0
  loop.train(config, tmp_path / "0", program, dataset)
  assert lines(tmp_path / "0")[0] != lines(tmp_path / "1")[0]


def test_a_program_of_another_config_is_refused(train, config):
  config.opt.b2 = 0.5
  with pytest.raises(ValueError, match=r"config\.opt"):
    train()


def test_unusable_folders(train, tmp_path, program):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="which is a file"):
    train(workdir=tmp_path / "file")
  with pytest.raises(UserError, match="cannot be written to"):
    train(workdir=tmp_path / "file" / "below")
  run = tmp_path / "run"
  errors = []

  def train_there_too():
    with pytest.raises(UserError) as error:
      train()
    errors.append(str(error.value))

  train(at_step(program, 2, train_there_too))
  assert "another process" in errors[0]
  (run / "summary.json").write_text("{")
  with pytest.raises(UserError, match=r"unreadable .*summary\.json"):
    train()


def test_a_tokenizer_too_large_for_the_model(train, dataset, config, tmp_path):
  config.data.vocab_size = config.model.vocab_size = 100
  with pytest.raises(UserError, match="tokenizer's 2048"):
    train()
  assert not (tmp_path / "run").exists()


def test_devices_are_checked_before_the_data(config, monkeypatch, tmp_path):
  monkeypatch.setattr(data, "load", None)
  config.mesh.data = 1000
  with pytest.raises(UserError, match=r"--config\.mesh\.data"):
    loop.train(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_tensorboard_and_progress(train, config, tmp_path, capsys):
  config.run.tensorboard = config.run.progress = True
  said = []
  train(say=said.append)
  events = list((tmp_path / "run" / "tensorboard").iterdir())
  assert len(events) == 1 and events[0].stat().st_size > 500
  bar = capsys.readouterr()
  assert "8/8" in bar.err and "tokens/s" in bar.err and "val " in bar.err
  assert bar.out == ""
  text = "\n".join(said)
  for fact in ("parameters", "2 sublayers", str(tmp_path / "run"), "sotu"):
    assert fact in text
