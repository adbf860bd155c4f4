"""Runs an ablation table: every row and seed in one process, resumable.

A row compiles one program, which all its seeds share. Runs go seed by seed
(every row at seed 0, then every row at seed 1, ...), so a table is useful
before it is complete. Each finished run is one line of the result file; a run
whose line is there is not run again, and an unfinished one continues from its
last checkpoint.
"""

import contextlib
import dataclasses
import datetime
import json
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import jax
from ml_collections import ConfigDict

from attnres_jax import data, provenance
from attnres_jax.analysis import report, results
from attnres_jax.analysis.throughput import throughput_ratio
from attnres_jax.config import validate
from attnres_jax.errors import UserError, unknown_name
from attnres_jax.train import loop
from attnres_jax.train.metrics import FILENAME
from attnres_jax.train.program import Program, compile_program
from attnres_jax.train.workdir import config_values


@dataclasses.dataclass(frozen=True)
class Run:
  """One row at one seed.

  Attributes:
    key: the row's key.
    name: the row's name in the paper.
    seed: fixes init and data order.
    config: what configs/train.py would give for this run.
    config_hash: see `results.config_hash`.
    workdir: checkpoints and metrics.
  """

  key: str
  name: str
  seed: int
  config: ConfigDict
  config_hash: str
  workdir: pathlib.Path


@dataclasses.dataclass
class Outcome:
  """What a call of `Ablation.run` came to.

  Attributes:
    finished: number of runs that finished in this call.
    failures: one line per run that failed, by "row, seed N".
    signal: number of the signal that stopped it (Ctrl-C: 2), else 0.
  """

  finished: int = 0
  failures: dict[str, str] = dataclasses.field(default_factory=dict)
  signal: int = 0


def run_config(config: ConfigDict, key: str, seed: int) -> ConfigDict:
  """The training config of one row and seed of an ablation config."""
  c = config.base.copy_and_resolve_references()
  with c.unlocked():
    c.mixer = config.rows[key].mixer.copy_and_resolve_references()
    c.run.seed = seed
  return c


def say(text: str) -> None:
  """Prints at once, also into a pipe or a file."""
  print(text, flush=True)


class Ablation:
  """A table, its runs and its files.

  Args:
    config: from configs/ablation.py.
    keys: rows to run, a subset of config.order; () for all. The table always
      shows every row.
    runs_dir: one folder per run goes into <runs_dir>/<table>_<size>/<row>/.
    results_dir: <table>_<size>.jsonl, .md, .png and _curves.png go here.
    say: receives progress, a line at a time.

  Raises:
    UserError: an unknown row key.
  """

  def __init__(
    self,
    config: ConfigDict,
    keys: Sequence[str] = (),
    runs_dir: str = "runs",
    results_dir: str = "results",
    say: Callable[[str], None] = say,
  ):
    for key in keys:
      if key not in config.order:
        raise unknown_name("row", key, config.order, "--rows=ROW,ROW")
    self.config = config
    self.stem = f"{config.table}_{config.size}"
    self.results_dir = pathlib.Path(results_dir)
    self.path = self.results_dir / f"{self.stem}.jsonl"
    self.say = say
    self.baseline = config.order[0]
    self.all_runs = [
      self._run_of(key, seed, pathlib.Path(runs_dir))
      for seed in range(max(config.rows[key].seeds for key in config.order))
      for key in config.order
      if seed < config.rows[key].seeds
    ]
    self.runs = [r for r in self.all_runs if not keys or r.key in keys]
    self._commit = provenance.commit()  # the code that this process has read
    self._programs: dict[str, Program] = {}
    self._ratios: dict[str, float | None] = {}
    self._datasets: dict[int, data.Dataset] = {}

  def _run_of(self, key: str, seed: int, runs_dir: pathlib.Path) -> Run:
    config = run_config(self.config, key, seed)
    digest = results.config_hash(config_values(config))
    # A run of another config keeps its folder; nothing is overwritten.
    folder = runs_dir / self.stem / key / f"seed{seed}-{digest}"
    name = self.config.rows[key].name
    return Run(key, name, seed, config, digest, folder)

  def lines(self) -> list[dict]:
    """The result lines of this table's runs; the last one of each run.

    Lines of other configs (other steps, other sizes of model, ...) are left
    out. Name and paper's loss come from the config, not from the line.
    """
    wanted = {run.config_hash for run in self.all_runs}
    by_hash = {
      line["config_hash"]: line
      for line in results.read(self.path)
      if line["config_hash"] in wanted
    }
    return list(by_hash.values())

  def listing(self) -> str:
    """The rows to run: key, seeds, whether finished, mixer and options."""
    done = {line["config_hash"] for line in self.lines()}
    text = []
    for key in dict.fromkeys(run.key for run in self.runs):
      row = self.config.rows[key]
      runs = [run for run in self.runs if run.key == key]
      finished = sum(run.config_hash in done for run in runs)
      options = row.mixer.to_dict()
      mixer = [options.pop("name"), *(f"{k}={v}" for k, v in options.items())]
      text.append(
        f"{key}: {row.name}, paper {row.paper_loss:.3f}, {finished} of"
        f" {len(runs)} seeds finished\n    {', '.join(mixer)}"
      )
    return "\n".join(text)

  def report(self) -> tuple[str, list[pathlib.Path]]:
    """Writes table and figures; see `report.write`."""
    rows = [
      dict(key=key, name=row.name, paper_loss=row.paper_loss)
      for key in self.config.order
      for row in [self.config.rows[key]]
    ]
    return report.write(
      self.results_dir,
      self.config.table,
      self.config.size,
      rows,
      self.lines(),
    )

  def run(self) -> Outcome:
    """Runs what has no result line yet.

    Raises:
      UserError: the data cannot be loaded, or the result file is damaged.
    """
    done = {line["config_hash"] for line in self.lines()}
    pending = [run for run in self.runs if run.config_hash not in done]
    outcome = Outcome()
    self.say(
      f"{len(self.runs)} runs, {len(self.runs) - len(pending)} finished before."
    )
    start = time.perf_counter()
    try:
      for i, run in enumerate(pending):
        self.say(f"[{i + 1}/{len(pending)}] {run.name}, seed {run.seed}")
        self._attempt(run, outcome)
        if outcome.signal:
          break
        self._release(pending[i + 1 :])
        spent = time.perf_counter() - start
        left = spent / (i + 1) * (len(pending) - i - 1)
        if left:
          self.say(f"  {_minutes(spent)} spent, about {_minutes(left)} left")
    except KeyboardInterrupt:  # outside of training: nothing to save
      outcome.signal = signal.SIGINT
    return outcome

  def _attempt(self, run: Run, outcome: Outcome) -> None:
    """Executes a run and records what came of it."""
    self._dataset(run)  # a fault of the data is every run's: let it stop all
    try:
      line, outcome.signal = self._execute(run)
    except Exception as error:  # any fault of one row must not stop the others
      outcome.failures[f"{run.name}, seed {run.seed}"] = _one_line(error)
      self.say(f"  FAILED: {_one_line(error)}")
      if not isinstance(error, UserError):
        traceback.print_exc(file=sys.stderr)
      return
    if line is None:
      return
    if jax.process_index() == 0:
      results.append(self.path, line)
    outcome.finished += 1
    self._say_result(line)

  def _execute(self, run: Run) -> tuple[dict | None, int]:
    """Trains one run.

    Returns:
      Its result line and 0; or None and the signal that interrupted it.
    """
    validate(run.config)
    program = self._program(run)
    ratio = self._ratio(run, program)
    summary = loop.train(
      run.config, run.workdir, program=program, dataset=self._dataset(run)
    )
    if summary.interrupted:
      return None, summary.signal
    line = dict(
      table=self.config.table,
      row=run.name,
      key=run.key,
      mixer=run.config.mixer.name,
      size=self.config.size,
      seed=run.seed,
      steps=summary.steps,
      tokens=summary.tokens,
      val_loss=summary.val_loss,
      val_bpb=summary.val_bpb,
      paper_loss=self.config.rows[run.key].paper_loss,
      params=program.num_params,
      throughput_ratio=ratio,
      compile_s=round(program.compile_s, 2),
      peak_bytes=program.peak_bytes,
      wall_s=round(summary.wall_s, 2),
      val_curve=val_curve(run.workdir / FILENAME),
      hardware=provenance.hardware(),
      commit=self._commit,
      versions=provenance.versions(),
      date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
      config_hash=run.config_hash,
      config=config_values(run.config),
    )
    return line, 0

  def _program(self, run: Run) -> Program:
    if run.key not in self._programs:
      self._programs[run.key] = compile_program(run.config)
      program = self._programs[run.key]
      self.say(
        f"  {program.num_params:,} parameters, compiled in"
        f" {program.compile_s:.1f} s; {program.mixer_description}"
      )
    return self._programs[run.key]

  def _dataset(self, run: Run) -> data.Dataset:
    """One data set per seed, shared by the rows."""
    if run.seed not in self._datasets:
      self._datasets[run.seed] = data.load(
        run.config.data,
        seed=run.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
      )
    return self._datasets[run.seed]

  def _ratio(self, run: Run, program: Program) -> float | None:
    """This row's tokens per second over the baseline's; None if it fails."""
    if run.key == self.baseline:
      return 1.0
    if run.key not in self._ratios:
      try:
        baseline = self._program(
          next(r for r in self.all_runs if r.key == self.baseline)
        )
      except Exception as error:
        self.say(f"  no throughput: the baseline fails: {_one_line(error)}")
        self._ratios[run.key] = None
        return None
      with contextlib.closing(self._dataset(run).train_iterator()) as batches:
        batch = next(batches)
      timing = self.config.timing
      self._ratios[run.key] = throughput_ratio(
        program, baseline, batch, timing.rounds, timing.max_seconds
      )
    return self._ratios[run.key]

  def _release(self, pending: Sequence[Run]) -> None:
    """Forgets programs and data that no pending run needs."""
    keys = {run.key for run in pending} | {self.baseline}
    for key in self._programs.keys() - keys:
      del self._programs[key]
    for seed in self._datasets.keys() - {run.seed for run in pending}:
      del self._datasets[seed]

  def _say_result(self, line: Mapping) -> None:
    ratio = line["throughput_ratio"]
    speed = "" if ratio is None else f", {ratio:.2f}x the baseline's tokens/s"
    self.say(
      f"  validation loss {line['val_loss']:.4f} nats per token,"
      f" {line['val_bpb']:.4f} bits per byte{speed}"
    )


def val_curve(path: pathlib.Path) -> list[tuple[int, float]]:
  """(step, validation loss) of every evaluation in a metrics.jsonl."""
  curve = {}
  for text in path.read_text().splitlines():
    metrics = json.loads(text)
    if "val_loss" in metrics:
      curve[metrics["step"]] = metrics["val_loss"]
  return sorted(curve.items())


def _one_line(error: BaseException) -> str:
  text = str(error).strip() or "no message"
  first = text.splitlines()[0]
  if isinstance(error, UserError):
    return first
  return f"{type(error).__name__}: {first}"


def _minutes(seconds: float) -> str:
  return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
