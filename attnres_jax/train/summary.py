"""What a run says to people: how it begins and how it stands."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from attnres_jax.train import goodput
from attnres_jax.train.program import Program


@dataclasses.dataclass(frozen=True)
class Summary:
  """How a run stands.

  Attributes:
    val_loss: of the last evaluation, nats per token; None if there was none.
    val_bpb: of the last evaluation, bits per byte; None likewise.
    steps: optimizer steps taken, over all sessions.
    tokens: positions trained on: steps x batch size x sequence length.
    wall_s: seconds of training, evaluation and saving over all sessions; what
      was lost with unsaved steps, and compilation, is not in it.
    interrupted: stopped before the last step, by a signal; saved.
    signal: number of that signal, else 0.
    seconds: of all sessions by part, see goodput.py; compilation, too.
  """

  val_loss: float | None
  val_bpb: float | None
  steps: int
  tokens: int
  wall_s: float
  interrupted: bool
  signal: int = 0
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)

  def text(self) -> str:
    """One line for people."""
    val = "not evaluated yet"
    if self.val_loss is not None:
      val = (
        f"validation loss {self.val_loss:.4f} nats per token,"
        f" {self.val_bpb:.4f} bits per byte"
      )
    text = f"step {self.steps:,}: {val}; {self.tokens:,} tokens in"
    text += f" {self.wall_s:.0f} s"
    return f"{text}; {goodput.text(self.seconds)}" if self.seconds else text


def say_continuing(
  step: int, processes: int, say: Callable[[str], None]
) -> None:
  """Tells from where a run goes on, and whether the processes are others."""
  text = f"continuing after step {step}"
  if processes != jax.process_count():
    text += f", saved by {processes} processes, on {jax.process_count()}"
  say(text)


def say_program(
  config: ConfigDict,
  program: Program,
  folder: pathlib.Path,
  say: Callable[[str], None],
) -> None:
  """Tells what is about to be trained, on what, and where it is kept."""
  devices = program.mesh.devices.flatten()
  tokens = config.data.batch_size * config.data.seq_len
  say(f"model: {program.num_params:,} parameters")
  say(f"depth: {program.mixer_description}")
  say(
    f"devices: {len(devices)} x {devices[0].device_kind}, processes:"
    f" {jax.process_count()}; compiled in"
    f" {program.compile_s:.1f} s"
  )
  say(
    f"steps: {config.run.steps:,} of {tokens:,} tokens, in all"
    f" {config.run.steps * tokens:,}"
  )
  say(f"outputs: {folder}")
