"""The training loop: one run of one config in one folder.

Steps are counted from 1 in everything that is written: step n is the state
after n updates, and its loss is that of the n-th batch before the update.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from attnres_jax import data
from attnres_jax.config import validate
from attnres_jax.errors import UserError
from attnres_jax.parallel import rules
from attnres_jax.parallel.distributed import from_first, row_shard, together
from attnres_jax.parallel.mesh import make_mesh
from attnres_jax.train.checkpoint import Checkpoints
from attnres_jax.train.errors import NonFiniteLossError
from attnres_jax.train.evaluation import evaluate
from attnres_jax.train.goodput import Stopwatch
from attnres_jax.train.metrics import MetricsLog, Progress
from attnres_jax.train.profiling import Profiler
from attnres_jax.train.program import (
  Program,
  TrainState,
  compile_program,
)
from attnres_jax.train.signals import StopRequest
from attnres_jax.train.summary import Summary, say_continuing, say_program
from attnres_jax.train.workdir import Workdir

__all__ = [
  "NonFiniteLossError",
  "Program",
  "Summary",
  "compile_program",
  "train",
]

# Steps between two times that several processes ask each other whether to
# stop; it makes them wait for one another.
STOP_EVERY = 10


def train(
  config: ConfigDict,
  workdir: str | os.PathLike,
  program: Program | None = None,
  dataset: data.Dataset | None = None,
  say: Callable[[str], None] = lambda line: None,
) -> Summary:
  """Trains, or continues to train, or tells how it ended.

  The same call continues a run exactly: losses, parameters and metrics.jsonl
  (but for timings) are those of a run that was never interrupted; on another
  mesh or number of processes, up to rounding. SIGINT and SIGTERM end it after
  the current step, with everything saved; of several processes, a signal to
  any ends all after the same step. Only process 0 writes, Orbax aside, and
  only it says something.

  Args:
    config: of configs/train.py.
    workdir: folder of the run; see workdir.py for what it comes to hold.
    program: `compile_program` of this config or one that differs in run.seed;
      compiled here if missing.
    dataset: `data.load` of this config; loaded here if missing.
    say: receives facts for people, a line at a time.

  Raises:
    UserError: config, data or folder are not usable; nothing was written.
    NonFiniteLossError: the loss or gradient is not finite any more. The last
      checkpoint is from before that.
  """
  watch = Stopwatch()
  if jax.process_index() != 0:
    say = _nothing
  validate(config)
  mesh = make_mesh(config)  # wrong devices: before the data is prepared
  with together("opening --workdir"):
    folder = Workdir(workdir, config)
    finished = folder.summary()
  finished = from_first(finished)
  if finished is not None:
    say(f"Finished before, nothing to do: {folder.path}")
    return Summary(**finished)
  if folder.changes:
    say(f"changed since this run began: {', '.join(folder.changes)}")
  if dataset is None:
    batches = NamedSharding(mesh, rules.BATCH)
    part = row_shard(batches, config.data.batch_size)
    with together("preparing the data"):
      dataset = data.load(
        config.data, config.run.seed, part.index, part.count, part.rows
      )
  if dataset.tokenizer.vocab_size > config.model.vocab_size:
    raise UserError(
      f"got model.vocab_size {config.model.vocab_size}: expected at least the"
      f" tokenizer's {dataset.tokenizer.vocab_size}. Set"
      " --config.data.vocab_size."
    )
  facts = dataset.describe().items()
  say("data: " + ", ".join(f"{key} {x}" for key, x in facts if x != ""))
  if program is None:
    say("compiling the train step and the eval step ...")
    with watch.part("compile"):
      program = compile_program(config)
  _require_program_of(config, program)
  say_program(config, program, folder.path, say)
  with contextlib.ExitStack() as stack:
    with together("opening --workdir"):
      stack.enter_context(folder.open())
    folder.require_shared()
    summary = _Run(config, folder, program, dataset, say, watch).run()
    if not summary.interrupted:
      folder.finish(dataclasses.asdict(summary))
  return summary


class _Run:
  """One session of `train`: the objects that the loop needs, and the loop."""

  def __init__(self, config, folder, program, dataset, say, watch):
    self.config, self.folder, self.program = config, folder, program
    self.dataset, self.say, self.watch = dataset, say, watch
    self.tokens_per_step = config.data.batch_size * config.data.seq_len
    self.eval_batches = dataset.eval_batches()
    self.first = jax.process_index() == 0

  def run(self) -> Summary:
    with contextlib.ExitStack() as stack:
      state, start = self._open(stack)
      return self._loop(state, start)

  def _open(self, stack: contextlib.ExitStack) -> tuple[TrainState, int]:
    """Opens everything that `stack` is to close; returns where to begin."""
    run = self.config.run
    self.checkpoints = Checkpoints(
      self.folder.checkpoints, run.keep_checkpoints
    )
    stack.push(self._close_checkpoints)
    self.iterator = self.dataset.train_iterator()
    stack.enter_context(contextlib.closing(self.iterator))
    self.saved = self.checkpoints.latest
    if self.saved is None:
      start, state = 0, self.program.init(run.seed)
      self.checkpoints.require_space(state)
    else:
      start = self.saved
      with self.watch.part("restore"), together("loading a checkpoint"):
        state, facts = self.checkpoints.restore(
          start, self.program.abstract_state, self.iterator
        )
      # Checkpoints from before there were parts have the sum only.
      self.watch.add_earlier(facts.get("seconds", {"step": facts["wall_s"]}))
      say_continuing(start, facts["processes"], self.say)
    self.log = MetricsLog(
      self.folder.path, start, write=self.first, tensorboard=run.tensorboard
    )
    stack.enter_context(contextlib.closing(self.log))
    self.progress = Progress(
      run.steps, start, self.tokens_per_step, run.progress and self.first
    )
    stack.enter_context(contextlib.closing(self.progress))
    self.profiler = Profiler(
      self.folder.path, run.profile_start, run.profile_steps, self.say
    )
    stack.enter_context(contextlib.closing(self.profiler))
    self.watch.start_laps(start)
    return state, start

  def _close_checkpoints(self, kind, *_) -> None:
    if kind is None:
      self.checkpoints.close()
    elif issubclass(kind, Exception):
      with contextlib.suppress(Exception):  # the first error is the one to see
        self.checkpoints.close()
    # Else Ctrl-C for the second time: do not wait for what is being saved.

  def _loop(self, state: TrainState, start: int) -> Summary:
    run = self.config.run
    step, pending = start, None
    with StopRequest() as stop, self.watch.part("step"):
      # Interrupted between a save and the evaluation of the same step?
      self._maybe_evaluate(state, step, stop)
      while step < run.steps and not self._should_stop(stop, step):
        with self.profiler.step(step + 1):
          batch = self.watch.wait_for(self.iterator)
          state, metrics = self.program.train_step(state, batch)
        # The device is busy with this step: time to look at the one before.
        self._report(pending)
        step += 1
        pending = step, metrics
        self.profiler.after(*pending)
        saves = step % run.checkpoint_every == 0 or step == run.steps
        if saves or self._evaluates(step):
          self._report(pending)
          pending = None
          self._maybe_evaluate(state, step, stop)
          if saves:
            self._save(state, step)
      self._report(pending)
      if step != self.saved:
        self._save(state, step)
      with self.watch.part("checkpoint"):
        self.checkpoints.wait()
    interrupted = step < run.steps or not self._evaluated(step)
    _, last = self.log.last_eval or (0, {})
    return Summary(
      val_loss=last.get("val_loss"),
      val_bpb=last.get("val_bpb"),
      steps=step,
      tokens=step * self.tokens_per_step,
      wall_s=self.watch.training_s,
      interrupted=interrupted,
      signal=stop.signal if interrupted else 0,
      seconds=self.watch.total(),
    )

  def _should_stop(self, stop: StopRequest, step: int) -> bool:
    """Whether to stop; all processes get the same answer."""
    if jax.process_count() == 1:
      return bool(stop.signal)
    if step % STOP_EVERY:
      return False
    signals = multihost_utils.process_allgather(np.int32(stop.signal))
    stop.signal = int(signals.max())
    return bool(stop.signal)

  def _report(self, pending: tuple[int, dict[str, jax.Array]] | None) -> None:
    """Waits for the metrics of a step, checks them and writes them if due."""
    if pending is None:
      return
    step, metrics = pending
    run = self.config.run
    values = {key: float(x) for key, x in jax.device_get(metrics).items()}
    # The loss first: compiled functions return their results in another order.
    values = {"loss": values.pop("loss"), **values}
    for name in ("loss", "grad_norm"):
      if not math.isfinite(values[name]):
        raise NonFiniteLossError(name, values[name], step, self.saved)
    self.progress.update(values["loss"])
    if step % run.log_every == 0 or step in (1, run.steps):
      timing = self.watch.lap(step, self.tokens_per_step)
      self.log.write(step, {**values, **timing})

  def _evaluates(self, step: int) -> bool:
    run = self.config.run
    return step > 0 and (step % run.eval_every == 0 or step == run.steps)

  def _evaluated(self, step: int) -> bool:
    last = self.log.last_eval
    done = last is not None and last[0] == step
    if jax.process_count() > 1:  # only the first can be sure to see the file
      done = bool(multihost_utils.broadcast_one_to_all(np.int32(done)))
    return done

  def _maybe_evaluate(
    self, state: TrainState, step: int, stop: StopRequest
  ) -> None:
    """Evaluates if it is due and not done; gives up when asked to stop."""
    if not self._evaluates(step) or self._evaluated(step):
      return
    with self.watch.part("eval"):
      values = evaluate(
        self.program, state, self.eval_batches,
        self.dataset.tokenizer.token_bytes, stop,
      )  # fmt: skip
    if values is None:
      return
    if not math.isfinite(values["val_loss"]):
      raise NonFiniteLossError("val_loss", values["val_loss"], step, self.saved)
    self.log.write(step, values)
    self.progress.validated(values["val_loss"])

  def _save(self, state: TrainState, step: int) -> None:
    """Saves a state whose metrics were finite."""
    facts = dict(wall_s=self.watch.training_s, seconds=self.watch.total())
    with self.watch.part("checkpoint"):
      self.checkpoints.save(step, state, self.iterator, facts)
    self.saved = step


def _require_program_of(config: ConfigDict, program: Program) -> None:
  """A program of another config would train something else, silently."""
  for group in ("model", "mixer", "opt", "mesh"):
    if program.config[group].to_dict() != config[group].to_dict():
      raise ValueError(f"the program was compiled for another config.{group}")
  for group, keys in {
    "data": ("batch_size", "seq_len"),
    "run": ("steps",),
  }.items():
    for key in keys:
      if program.config[group][key] != config[group][key]:
        raise ValueError(
          f"the program was compiled for {group}.{key}"
          f" {program.config[group][key]}, not {config[group][key]}"
        )


def _nothing(line: str) -> None:
  del line
