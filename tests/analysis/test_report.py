"""Table and figures from result lines, with numbers worked out by hand."""

import json

import matplotlib.image
import pytest

from attnres_jax.analysis import report, results
from attnres_jax.analysis.summary import summarize
from attnres_jax.errors import UserError

ROWS = [
  dict(key="baseline", name="Baseline", paper_loss=1.766),
  dict(key="full", name="AttnRes Full", paper_loss=1.737),
  dict(key="swa", name="SWA", paper_loss=1.764),
]


def make_line(key="full", seed=0, val_loss=4.0, **changes):
  line = dict(
    row=key, key=key, mixer="m", size="tiny", seed=seed, steps=100,
    tokens=102_400, val_loss=val_loss, val_bpb=val_loss / 2, params=1000,
    throughput_ratio=0.5, compile_s=3.0, peak_bytes=3 * 2**20, wall_s=9.0,
    hardware="2 CPU cores", commit="0123456789abcdef" * 2 + "01234567",
    date="2026-03-16T12:00:00+00:00", config_hash=f"{key}{seed}",
    val_curve=[[0, 7.0], [100, val_loss]],
    config=dict(
      data=dict(batch_size=8, seq_len=128, source="sotu"),
      model=dict(layers=8, width=64, vocab_size=2048),
    ),
  )  # fmt: skip
  return {**line, **changes}


LINES = [
  make_line("baseline", 0, 4.00, throughput_ratio=1.0),
  make_line("full", 1, 3.98, params=1200),
  make_line("full", 0, 3.90, params=1200),
  make_line("baseline", 1, 4.10, throughput_ratio=1.0),
  make_line("full", 2, 3.95, params=1200),
]


@pytest.mark.fast
def test_summary_pairs_differences_by_seed():
  baseline, full, swa = summarize(ROWS, LINES)
  assert baseline.loss == pytest.approx(4.05)
  assert baseline.diff == 0
  # Seed 2 has no baseline: in the mean loss, not in the differences.
  assert full.losses == {0: 3.90, 1: 3.98, 2: 3.95}
  assert full.loss == pytest.approx((3.90 + 3.98 + 3.95) / 3)
  assert full.diffs == pytest.approx({0: -0.10, 1: -0.12})
  assert full.diff == pytest.approx(-0.11)
  # Two values d apart have the sample standard deviation d / sqrt(2).
  assert full.diff_std == pytest.approx(0.02 / 2**0.5)
  assert full.paper_diff == pytest.approx(1.737 - 1.766)
  assert full.peak_mib == 3
  assert full.bpb == pytest.approx(full.loss / 2)
  assert swa.loss is None and swa.diff is None and swa.diff_std is None


@pytest.mark.fast
def test_table_prints_every_column():
  lines = report.format_table(summarize(ROWS, LINES)).splitlines()
  assert len({len(line) for line in lines}) == 1  # aligned
  cells = [[c.strip() for c in line.strip("| ").split("|")] for line in lines]
  assert cells[0] == [
    "row", "paper loss", "paper diff", "our loss", "our diff", "seeds",
    "bits/byte", "params", "tokens/s", "compile s", "peak MiB",
  ]  # fmt: skip
  assert cells[2] == [
    "Baseline", "1.766", "-", "4.0500", "-", "2", "2.0250", "1,000", "1.00x",
    "3.0", "3.0",
  ]  # fmt: skip
  assert cells[3][:6] == [
    "AttnRes Full", "1.737", "-0.029", "3.9433", "-0.1100 ± 0.0141", "3",
  ]  # fmt: skip
  assert cells[4] == ["SWA", "1.764", "-0.002"] + ["-"] * 8


@pytest.mark.fast
def test_one_seed_has_no_spread():
  _, full, _ = summarize(ROWS, [LINES[0], LINES[2]])
  assert full.diff_std is None
  assert "± " not in report.format_table([full])


@pytest.mark.fast
def test_rows_without_a_baseline_have_no_difference():
  _, full, _ = summarize(ROWS, LINES[1:3])
  assert full.diff is None
  assert full.loss == pytest.approx(3.94)


@pytest.mark.fast
def test_caption_says_what_was_run_and_whose_numbers_they_are():
  other = make_line("swa", 0, commit="f" * 40, hardware="1 TPU v5e")
  text = report.caption("table4", "tiny", [*LINES, other])
  for part in (
    "Table 4",
    "size tiny",
    "8 Transformer blocks (16 sublayers)",
    "100 steps of 8 x 128 tokens (102,400 tokens)",
    "2 CPU cores / 1 TPU v5e",
    "0123456789ab / ffffffffffff",
    "the paper's own numbers",
  ):
    assert part in text


@pytest.mark.parametrize("lines", [LINES, LINES[:1], []], ids=len)
def test_write_makes_table_and_readable_figures(tmp_path, lines):
  text, paths = report.write(tmp_path / "new", "table4", "tiny", ROWS, lines)
  assert [path.name for path in paths] == [
    "table4_tiny.md",
    "table4_tiny.png",
    "table4_tiny_curves.png",
  ]
  assert text in paths[0].read_text()
  for path in paths[1:]:
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 200
    assert pixels.std() > 0.01  # not blank
  # Nothing but the outputs is left behind.
  assert sorted((tmp_path / "new").iterdir()) == sorted(paths)


@pytest.mark.fast
def test_append_and_read(tmp_path):
  path = tmp_path / "results" / "table4_tiny.jsonl"
  assert results.read(path) == []
  for line in LINES[:2]:
    results.append(path, line)
  assert results.read(path) == LINES[:2]
  # A last line without its newline, as after an edit by hand, stays whole.
  path.write_text(path.read_text().rstrip("\n"))
  results.append(path, LINES[2])
  assert results.read(path) == LINES[:3]
  assert list(path.parent.iterdir()) == [path]


@pytest.mark.fast
def test_a_failing_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
  path = tmp_path / "table4_tiny.jsonl"
  results.append(path, LINES[0])
  before = path.read_bytes()

  def fail(*_):
    raise OSError("disk full")

  monkeypatch.setattr("os.fsync", fail)
  with pytest.raises(OSError, match="disk full"):
    results.append(path, LINES[1])
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.fast
@pytest.mark.parametrize(
  "text, reason",
  [
    ('{"row": "full"', "not a JSON object"),
    ("17", "not a JSON object"),
    (json.dumps({"row": "full"}), "lacks mixer"),
  ],
)
def test_damaged_result_files_are_named(tmp_path, text, reason):
  path = tmp_path / "table4_tiny.jsonl"
  path.write_text(json.dumps(LINES[0]) + "\n" + text + "\n")
  with pytest.raises(UserError, match=f"{path}:2.*{reason}") as error:
    results.read(path)
  assert "\n" not in str(error.value)


@pytest.mark.fast
def test_config_hash_ignores_what_does_not_change_the_run():
  config = dict(
    run=dict(steps=8, seed=0, progress=True, log_every=10),
    data=dict(seq_len=32, prefetch=8),
    mixer=dict(name="block", block_size=4),
  )
  same = config_with(config, "run", progress=False, log_every=1)
  same = config_with(same, "data", prefetch=0)
  # An option that came later, unset.
  same = config_with(same, "mixer", implementation=None)
  assert results.config_hash(config) == results.config_hash(same)
  for group, change in [
    ("run", dict(seed=1)),
    ("run", dict(steps=9)),
    ("data", dict(seq_len=64)),
    ("mixer", dict(block_size=8)),
    ("mixer", dict(name="full")),
    ("mixer", dict(implementation="xla")),
  ]:
    other = config_with(config, group, **change)
    assert results.config_hash(config) != results.config_hash(other)


def config_with(config, group, **changes):
  return {**config, group: {**config[group], **changes}}
