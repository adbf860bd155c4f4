"""`python -m scripts.ablate` as a user calls it."""

import os
import pathlib
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parent.parent.parent
# Two data-parallel devices would be another program; results stay comparable.
ENV = {**os.environ, "JAX_PLATFORMS": "cpu"}


def ablate(tmp_path, *flags, table="table4,size=micro"):
  return subprocess.run(
    [
      sys.executable,
      "-m",
      "scripts.ablate",
      f"--config=configs/ablation.py:{table}",
      f"--runs_dir={tmp_path / 'runs'}",
      f"--results_dir={tmp_path / 'results'}",
      *flags,
    ],
    cwd=REPO,
    env=ENV,
    capture_output=True,
    text=True,
  )


def test_list_prints_every_row_and_writes_nothing(tmp_path):
  done = ablate(tmp_path, "--list")
  assert done.returncode == 0, done.stderr
  for text in ("full_input_query: Full, input-dependent query", "query=input"):
    assert text in done.stdout
  assert len(done.stdout.splitlines()) == 24
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "flags, table, message",
  [
    (["--rows=blok"], "table4,size=micro", "Did you mean 'block'"),
    ([], "table5", "Did you mean 'table4'"),
    (["--config.base.run.stepz=3"], "table4,size=micro", "steps"),
  ],
)
def test_a_users_mistake_is_one_line(tmp_path, flags, table, message):
  done = ablate(tmp_path, *flags, table=table)
  assert done.returncode == 2
  assert message in done.stderr
  assert "Traceback" not in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1
  assert not list(tmp_path.iterdir())


def test_a_failed_row_makes_the_exit_code_1(tmp_path):
  flags = (
    "--rows=baseline,denseformer",
    "--config.rows.denseformer.mixer.period=0",
    "--config.base.run.steps=4",
    "--config.timing.rounds=1",
  )
  done = ablate(tmp_path, *flags)
  assert done.returncode == 1, done.stderr
  assert "FAILED: DenseFormer, seed 0" in done.stdout
  table = (tmp_path / "results" / "table4_micro.md").read_text()
  assert table in table and "Baseline (PreNorm)" in done.stdout
  for name in ("table4_micro.png", "table4_micro_curves.png"):
    assert (tmp_path / "results" / name).exists()
  # The same table from the file alone, without runs.
  again = ablate(tmp_path, "--report_only", *flags)
  assert again.returncode == 0, again.stderr
  assert table == (tmp_path / "results" / "table4_micro.md").read_text()
