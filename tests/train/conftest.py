"""One compiled program and one data set for all tests of training."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest

from attnres_jax import data
from attnres_jax.train import loop
from attnres_jax.train.checkpoint import Checkpoints
from attnres_jax.train.goodput import TIMING_KEYS
from configs.train import get_config
from tests.conftest import REPO

# Tokenised text stays inside the repository, for all test processes.
os.environ.setdefault("ATTNRES_CACHE", str(REPO / ".cache" / "attnres"))


def micro_config(mixer: str = "block"):
  """Size micro with a single Transformer block: it compiles faster."""
  config = get_config(f"{mixer},size=micro")
  config.model.layers = 1
  config.run.progress = False
  config.run.tensorboard = False
  config.run.log_every = 1
  return config


@pytest.fixture
def config():
  return micro_config()


@pytest.fixture(scope="session")
def program():
  return loop.compile_program(micro_config())


@pytest.fixture(scope="session")
def dataset():
  config = micro_config()
  return data.load(config.data, seed=config.run.seed)


@pytest.fixture(scope="session")
def batch(dataset):
  """A training batch with uneven masks: rows have 31, 20, 9 and 0 targets."""
  iterator = dataset.train_iterator()
  batch = {key: np.array(value) for key, value in next(iterator).items()}
  iterator.close()
  for row, kept in enumerate((31, 20, 9, 0)):
    batch["mask"][row, kept:] = 0
  return batch


def at_step(program, step: int, action, metrics=None):
  """The program, but `action()` happens in the call of one train step.

  Args:
    step: counted from 1 in calls of the new program.
    action: called before the step.
    metrics: replaces metrics of that step.
  """
  calls = []

  def train_step(state, batch):
    calls.append(None)
    if len(calls) == step:
      action()
    state, found = program._train_step(state, batch)
    return state, {**found, **(metrics or {})} if len(calls) == step else found

  return dataclasses.replace(program, _train_step=train_step)


def send(number: int):
  return lambda: os.kill(os.getpid(), number)


def lines(workdir):
  """metrics.jsonl without what depends on the machine."""
  text = (workdir / "metrics.jsonl").read_text()
  assert text.endswith("\n")
  return [
    {k: v for k, v in json.loads(line).items() if k not in TIMING_KEYS}
    for line in text.splitlines()
  ]


def saved_state(program, dataset, workdir, step):
  """State and data position of a checkpoint, as NumPy arrays."""
  checkpoints = Checkpoints(workdir / "checkpoints", 2)
  iterator = dataset.train_iterator()
  state, _ = checkpoints.restore(step, program.abstract_state, iterator)
  position = iterator.get_state()
  checkpoints.close()
  iterator.close()
  return jax.tree.map(np.asarray, state), position


def assert_same(a, b):
  """Equal to the bit."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)
