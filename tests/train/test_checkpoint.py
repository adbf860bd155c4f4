"""Checkpoints: exact, whole, of the right model, and no more than asked."""

import collections
import shutil

import jax
import numpy as np
import pytest

from attnres_jax.errors import UserError
from attnres_jax.train import program as program_lib
from attnres_jax.train.checkpoint import Checkpoints
from tests.train.conftest import assert_same, micro_config


@pytest.fixture
def open_checkpoints(tmp_path):
  opened = []

  def open_(keep=2):
    opened.append(Checkpoints(tmp_path / "checkpoints", keep))
    return opened[-1]

  yield open_
  for checkpoints in opened:
    checkpoints.close()


@pytest.fixture
def iterator(dataset):
  iterator = dataset.train_iterator()
  yield iterator
  iterator.close()


def abstract_state(**model):
  """Shapes of the micro model with other values in config.model."""
  config = micro_config()
  config.model.update(model)
  with pytest.MonkeyPatch.context() as patch:
    # Everything but the compilation.
    patch.setattr(jax.stages.Lowered, "compile", lambda self: None)
    patch.setattr(program_lib, "_peak_bytes", lambda compiled: 0)
    return program_lib.compile_program(config).abstract_state


def test_restores_state_data_and_facts(
  open_checkpoints, program, dataset, iterator, batch
):
  state, _ = program.train_step(program.init(3), batch)
  expected = jax.tree.map(np.array, state)
  for _ in range(3):
    next(iterator)
  checkpoints = open_checkpoints()
  assert checkpoints.latest is None
  checkpoints.save(1, state, iterator, {"wall_s": 1.5})
  following = next(iterator)
  checkpoints.close()

  checkpoints, other = open_checkpoints(), dataset.train_iterator()
  assert checkpoints.latest == 1
  restored, facts = checkpoints.restore(1, program.abstract_state, other)
  assert_same(jax.tree.map(np.asarray, restored), expected)
  assert facts == {"wall_s": 1.5, "processes": 1}
  assert_same(next(other), following)
  other.close()
  for leaf, wanted in zip(
    jax.tree.leaves(restored), jax.tree.leaves(program.abstract_state),
    strict=True,
  ):  # fmt: skip
    assert leaf.sharding == wanted.sharding and leaf.dtype == wanted.dtype


def test_training_on_does_not_reach_what_is_being_saved(
  open_checkpoints, program, iterator, batch
):
  """The step after a save overwrites the state's memory (it is donated)."""
  checkpoints, state, expected = open_checkpoints(), program.init(0), {}
  for step in range(1, 5):
    state, _ = program.train_step(state, batch)
    expected[step] = jax.tree.map(np.array, state)
    checkpoints.save(step, state, iterator, {})
    for _ in range(3):
      state, _ = program.train_step(state, batch)
  checkpoints.wait()
  for step in (3, 4):
    restored, _ = checkpoints.restore(step, program.abstract_state, iterator)
    assert_same(jax.tree.map(np.asarray, restored), expected[step])


def test_keeps_the_newest(open_checkpoints, program, iterator, tmp_path):
  checkpoints, state = open_checkpoints(keep=2), program.init(0)
  for step in (1, 2, 3, 10):
    checkpoints.save(step, state, iterator, {})
  checkpoints.wait()
  assert checkpoints.latest == 10
  names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
  assert names == {"3", "10"}


def test_another_model_is_refused(
  open_checkpoints, program, iterator, tmp_path
):
  checkpoints = open_checkpoints()
  checkpoints.save(1, program.init(0), iterator, {})
  checkpoints.wait()
  for model, found in (
    (dict(layers=2), "blocks.1"),  # deeper
    (dict(width=64), "float32"),  # wider
    (dict(mlp_hidden=32), "mlp"),
    (dict(qk_norm=False), "k_norm"),
  ):
    with pytest.raises(UserError, match=found) as error:
      checkpoints.restore(1, abstract_state(**model), iterator)
    message = str(error.value)
    assert "\n" not in message and "another model" in message
    assert str(tmp_path) in message
  # Nor was anything harmed by trying.
  checkpoints.restore(1, program.abstract_state, iterator)


def test_a_damaged_checkpoint_is_named(
  open_checkpoints, program, iterator, tmp_path
):
  checkpoints = open_checkpoints()
  checkpoints.save(1, program.init(0), iterator, {})
  checkpoints.close()
  # All of it: of a part, Orbax leaves reads to the garbage collector.
  shutil.rmtree(tmp_path / "checkpoints" / "1" / "state")
  with pytest.raises(UserError, match="unreadable checkpoint") as error:
    open_checkpoints().restore(1, program.abstract_state, iterator)
  assert "\n" not in str(error.value)
  assert str(tmp_path / "checkpoints" / "1") in str(error.value)


def test_a_half_written_checkpoint_is_not_one(
  open_checkpoints, program, iterator, tmp_path
):
  checkpoints = open_checkpoints()
  checkpoints.save(1, program.init(0), iterator, {})
  checkpoints.close()
  folder = tmp_path / "checkpoints"
  shutil.copytree(folder / "1", folder / "2.orbax-checkpoint-tmp")
  checkpoints = open_checkpoints()
  assert checkpoints.latest == 1
  checkpoints.close()
  assert [path.name for path in folder.iterdir()] == ["1"]


def test_needs_disk_space(
  open_checkpoints, program, iterator, monkeypatch, tmp_path
):
  checkpoints, state = open_checkpoints(), program.init(0)
  checkpoints.save(1, state, iterator, {})
  checkpoints.wait()
  usage = collections.namedtuple("usage", "free")
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**20))
  with pytest.raises(UserError, match=r"1\.0 MiB free, expected \d") as error:
    checkpoints.save(2, state, iterator, {})
  assert "--workdir" in str(error.value) and "\n" not in str(error.value)
  checkpoints.restore(1, program.abstract_state, iterator)


def test_a_disk_that_becomes_full(
  open_checkpoints, program, iterator, monkeypatch
):
  """The message is TensorStore's own, from a full file system."""
  checkpoints, state = open_checkpoints(), program.init(0)
  checkpoints.save(1, state, iterator, {})
  checkpoints.wait()

  def fail():
    raise ValueError(
      'RESOURCE_EXHAUSTED: Failed writing: "x": Failed to write 250724 bytes'
      " to file 30: No space left on device [os_error_code='28']"
    )

  with monkeypatch.context() as patch:
    patch.setattr(checkpoints._checkpointer, "wait", fail)
    with pytest.raises(UserError, match="became full"):
      checkpoints.save(2, state, iterator, {})
  assert checkpoints.latest == 1
  checkpoints.restore(1, program.abstract_state, iterator)
