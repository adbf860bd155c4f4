"""The runner: order, skipping, failures, interruption, equal starts."""

import dataclasses
import json
import signal

import jax
import numpy as np
import pytest
from flax import nnx

from attnres_jax import data
from attnres_jax.analysis import ablation, results, throughput
from attnres_jax.depth_mixing.base import DepthParam
from attnres_jax.model.decoder import build_model
from configs import ablation as tables

TWO_ROWS = ("baseline", "block")


@pytest.fixture
def config():
  c = tables.get_config("table4,size=micro")
  c.base.run.progress = False
  c.base.run.tensorboard = False
  c.timing.rounds = 2
  return c


@pytest.fixture
def make(tmp_path):
  """Builds a quiet runner in a folder of the test's own."""

  def make(config, keys=TWO_ROWS):
    return ablation.Ablation(
      config,
      keys,
      runs_dir=str(tmp_path / "runs"),
      results_dir=str(tmp_path / "results"),
      say=lambda text: None,
    )

  return make


@pytest.mark.fast
def test_runs_go_seed_by_seed(make):
  runs = make(tables.get_config("table4,size=small"), ()).runs
  order = [(run.seed, run.key) for run in runs]
  assert len(order) == 22
  assert order[:2] == [(0, "baseline"), (0, "denseformer")]
  assert order[12:17] == [
    (1, key) for key in ("baseline", "denseformer", "mhc", "full", "block")
  ]
  assert [run.seed for run in runs] == sorted(run.seed for run in runs)
  assert len({run.workdir for run in runs}) == 22


@pytest.mark.fast
@pytest.mark.parametrize("table", tables.TABLES)
def test_rows_differ_in_nothing_but_the_mixer(make, table):
  config = tables.get_config(f"{table},size=micro")
  config.base.opt.lr = 0.5
  configs = [run.config.to_dict() for run in make(config, ()).runs]
  mixers = [json.dumps(c.pop("mixer"), sort_keys=True) for c in configs]
  assert all(c == configs[0] for c in configs)
  assert configs[0]["opt"]["lr"] == 0.5
  assert len(set(mixers)) == len(mixers)


def test_rows_start_from_the_same_sublayer_weights(make, config):
  def weights(run):
    _, _, rest = nnx.split(build_model(run.config, 3), DepthParam, nnx.Param)
    return {
      "/".join(map(str, path)): np.asarray(leaf)
      for path, leaf in nnx.to_flat_state(rest)
    }

  config.base.model.layers = 1
  first, *others = [weights(run) for run in make(config, ()).runs]
  assert first
  for other in others:
    jax.tree.map(np.testing.assert_array_equal, first, other)


def test_rows_see_the_same_batches(make, config):
  baseline, block = make(config).runs
  streams = [
    data.load(
      run.config.data, seed=run.seed, process_index=0, process_count=1
    ).train_iterator()
    for run in (baseline, block)
  ]
  for _ in range(3):
    a, b = (next(stream) for stream in streams)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_table_is_run_once(make, config, monkeypatch):
  table = make(config)
  outcome = table.run()
  assert outcome == ablation.Outcome(finished=2)
  lines = results.read(table.path)
  assert [line["key"] for line in lines] == list(TWO_ROWS)
  for line, run in zip(lines, table.runs, strict=True):
    assert set(results.REQUIRED_KEYS) <= set(line)
    assert line["config"] == json.loads(json.dumps(run.config.to_dict()))
    assert line["row"] == run.name
    assert line["steps"] == config.base.run.steps
    assert line["tokens"] == 8 * 4 * 32
    assert 0 < line["val_loss"] < 10 and 0 < line["val_bpb"] < 10
    assert line["val_curve"][-1] == [8, line["val_loss"]]
    assert line["peak_bytes"] > line["params"] * 4
  baseline, block = lines
  assert baseline["throughput_ratio"] == 1
  assert block["throughput_ratio"] > 0
  assert block["params"] > baseline["params"]

  # Again: nothing is trained or compiled, the file stays as it is.
  before = table.path.read_bytes()
  with monkeypatch.context() as patch:
    patch.setattr(ablation.loop, "train", None)
    patch.setattr(ablation, "compile_program", None)
    assert make(config).run() == ablation.Outcome()
  assert table.path.read_bytes() == before

  # Another config: runs of its own, and a table of its own.
  config.base.run.steps = 6
  other = make(config, ("baseline",))
  assert other.lines() == []
  assert other.run() == ablation.Outcome(finished=1)
  assert table.path.read_bytes().startswith(before)
  assert [line["steps"] for line in other.lines()] == [6]
  assert [line["steps"] for line in table.lines()] == [8, 8]


@dataclasses.dataclass
class FakeProgram:
  num_params: int = 100
  compile_s: float = 1.0
  peak_bytes: int = 2**20
  mixer_description: str = "a fake"


@pytest.fixture
def fake_training(monkeypatch):
  """Replaces compilation, timing and training; returns their log."""
  log = []

  def compile_program(config):
    log.append(("compile", config.mixer.name))
    return FakeProgram()

  def train(config, workdir, program, dataset):
    del program, dataset
    log.append(("train", config.mixer.name, config.run.seed))
    workdir.mkdir(parents=True)
    (workdir / "metrics.jsonl").write_text('{"step": 8, "val_loss": 4.0}\n')
    return ablation.loop.Summary(
      val_loss=4.0, val_bpb=2.0, steps=8, tokens=1024, wall_s=1.0,
      interrupted=False,
    )  # fmt: skip

  monkeypatch.setattr(ablation, "compile_program", compile_program)
  monkeypatch.setattr(ablation.loop, "train", train)
  monkeypatch.setattr(ablation, "throughput_ratio", lambda *_: 0.5)
  return log


def test_seeds_share_a_program(make, fake_training):
  table = make(tables.get_config("table4,size=micro,seeds=2"))
  assert table.run() == ablation.Outcome(finished=4)
  assert fake_training == [
    ("compile", "residual"),
    ("train", "residual", 0),
    ("compile", "block"),
    ("train", "block", 0),
    ("train", "residual", 1),
    ("train", "block", 1),
  ]
  assert len(table.lines()) == 4


def test_a_failed_row_does_not_stop_the_others(make, config, fake_training):
  config.rows.denseformer.mixer.period = 0
  table = make(config, ("baseline", "denseformer", "block"))
  outcome = table.run()
  assert outcome.finished == 2
  assert outcome.signal == 0
  (failure,) = outcome.failures.items()
  assert failure[0] == "DenseFormer, seed 0"
  assert "period" in failure[1] and "\n" not in failure[1]
  assert [line["key"] for line in table.lines()] == ["baseline", "block"]
  # Not finished: tried again, and only that one.
  fake_training.clear()
  assert list(make(config, ("baseline", "denseformer")).run().failures)
  assert fake_training == []


def test_rows_without_their_baseline_still_run(make, config, monkeypatch,
                                               fake_training):  # fmt: skip
  compile_program = ablation.compile_program

  def fail_on_residual(c):
    if c.mixer.name == "residual":
      raise RuntimeError("out of memory\nand a long trace")
    return compile_program(c)

  monkeypatch.setattr(ablation, "compile_program", fail_on_residual)
  table = make(config)
  outcome = table.run()
  assert outcome.failures == {
    "Baseline (PreNorm), seed 0": "RuntimeError: out of memory"
  }
  assert [line["throughput_ratio"] for line in table.lines()] == [None]
  table.report()  # a table with holes


@pytest.mark.parametrize("how", ["summary", "exception"])
def test_interruption_stops_and_continues(make, config, monkeypatch, how,
                                          fake_training):  # fmt: skip
  train = ablation.loop.train

  def interrupt(run_config, *args, **kwargs):
    if run_config.mixer.name != "block":
      return train(run_config, *args, **kwargs)
    if how == "exception":
      raise KeyboardInterrupt
    return ablation.loop.Summary(
      val_loss=None, val_bpb=None, steps=3, tokens=1, wall_s=1.0,
      interrupted=True, signal=signal.SIGINT,
    )  # fmt: skip

  keys = ("baseline", "block", "block_heads")
  with monkeypatch.context() as patch:
    patch.setattr(ablation.loop, "train", interrupt)
    outcome = make(config, keys).run()
  assert outcome == ablation.Outcome(finished=1, signal=signal.SIGINT)
  assert make(config, keys).run() == ablation.Outcome(finished=2)


@pytest.mark.fast
def test_throughput_ratio_is_of_interleaved_steps(monkeypatch):
  clock = [0.0]
  calls = []
  monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock[0])

  @dataclasses.dataclass
  class Program:
    name: str
    step_s: float

    def init(self, seed):
      del seed
      return 0

    def train_step(self, state, batch):
      del batch
      calls.append(self.name)
      # The machine is three times slower during steps 6 to 9.
      slow = 3 if 6 <= len(calls) < 10 else 1
      clock[0] += self.step_s * slow
      return state + 1, {}

  row, base = Program("row", 0.5), Program("base", 0.25)
  ratio = throughput.throughput_ratio(row, base, {}, 6, 1e9)
  assert ratio == pytest.approx(0.5)
  assert calls[:6] == ["row", "base", "base", "row", "row", "base"]
  assert len(calls) == 2 + 2 * 6
  calls.clear()
  throughput.throughput_ratio(row, base, {}, 100, 1.0)
  assert len(calls) == 2 + 2 * 3  # long steps: three pairs are enough


@pytest.mark.fast
def test_unknown_rows_are_named(make, config):
  with pytest.raises(ValueError, match="Did you mean 'block'") as error:
    make(config, ("blok",))
  assert "--rows" in str(error.value)
