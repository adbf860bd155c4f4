"""From result lines to the ablation's table and its two figures.

Reads result lines only (attnres_jax.analysis.results), so tables and figures
can be made again from the committed files.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence

from attnres_jax.analysis.figures import plot_curves, plot_diffs
from attnres_jax.analysis.summary import Row, summarize
from attnres_jax.train.files import write_atomically

NOT_RUN = "-"


def format_table(rows: Sequence[Row]) -> str:
  """A Markdown table that is also aligned in a terminal."""
  header = [
    "row",
    "paper loss",
    "paper diff",
    "our loss",
    "our diff",
    "seeds",
    "bits/byte",
    "params",
    "tokens/s",
    "compile s",
    "peak MiB",
  ]
  cells = [header]
  for i, row in enumerate(rows):
    diff = NOT_RUN
    if row.diff is not None and i > 0:
      diff = f"{row.diff:+.4f}"
      if row.diff_std is not None:
        diff += f" ± {row.diff_std:.4f}"
    cells.append(
      [
        row.name,
        f"{row.paper_loss:.3f}",
        f"{row.paper_diff:+.3f}" if i > 0 else NOT_RUN,
        _format(row.loss, ".4f"),
        diff,
        str(len(row.losses) or NOT_RUN),
        _format(row.bpb, ".4f"),
        _format(row.params, ",d"),
        _format(row.throughput_ratio, ".2f", "x"),
        _format(row.compile_s, ".1f"),
        _format(row.peak_mib, ".1f"),
      ]
    )
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  lines = ["| " + " | ".join(_align(row, widths)) + " |" for row in cells]
  rule = [
    "-" * width if column == 0 else "-" * (width - 1) + ":"
    for column, width in enumerate(widths)
  ]
  lines.insert(1, "| " + " | ".join(rule) + " |")
  return "\n".join(lines) + "\n"


def caption(table: str, size: str, lines: Sequence[Mapping]) -> str:
  """What the numbers are, from the result lines themselves; plain Markdown."""
  title = {"table4": "Table 4", "figure6": "Figure 6"}.get(table, table)
  if not lines:
    return f"{title} at size {size}: no run has finished."

  def every(value) -> str:
    """Every distinct value among the lines, in order of appearance."""
    return " / ".join(dict.fromkeys(str(value(line)) for line in lines))

  config = lines[0]["config"]
  model, data = config["model"], config["data"]
  return (
    f"{title} of arXiv:2603.15031 at size {size}: {model['layers']} Transformer"
    f" blocks ({2 * model['layers']} sublayers), width {model['width']},"
    f" {every(lambda x: format(x['steps'], ',d'))} steps of"
    f" {data['batch_size']} x {data['seq_len']} tokens"
    f" ({every(lambda x: format(x['tokens'], ',d'))} tokens), corpus"
    f" {data['source']}, vocabulary {model['vocab_size']:,d}. Hardware:"
    f" {every(lambda x: x['hardware'])}. Commit:"
    f" {every(lambda x: x['commit'][:12] + x['commit'][40:])}. Date:"
    f" {every(lambda x: x['date'][:10])}.\n\n"
    "The paper's columns are the paper's own numbers, from its 436M-parameter"
    " model; they are not ours. Our loss is the validation loss in nats per"
    " token, mean over seeds. Differences are from the baseline, paired by"
    " seed; ± is their sample standard deviation; negative is better. tokens/s"
    " is relative to the baseline: training steps of both, timed in turns in"
    " one process. compile s: training and evaluation step. peak MiB: what the"
    " compiler reserves for a training step on one device."
  )


def write(
  folder: str | os.PathLike,
  table: str,
  size: str,
  rows: Sequence[Mapping],
  lines: Sequence[Mapping],
) -> tuple[str, list[pathlib.Path]]:
  """Writes `<table>_<size>.md`, `.png` and `_curves.png` into `folder`.

  Args:
    folder: made if it is missing.
    table: e.g. "table4".
    size: e.g. "tiny".
    rows: as in `summarize`.
    lines: as in `summarize`.

  Returns:
    Table and caption as text, and the paths written.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  stem = f"{table}_{size}"
  summary = summarize(rows, lines)
  text = f"{format_table(summary)}\n{caption(table, size, lines)}\n"
  markdown, diffs, curves = (
    folder / f"{stem}{end}" for end in (".md", ".png", "_curves.png")
  )
  title = caption(table, size, lines).split(":")[0]
  write_atomically(
    markdown,
    f"# {title}\n\n{text}\n![differences]({diffs.name})\n\n"
    f"![curves]({curves.name})\n",
  )
  plot_diffs(summary, diffs)
  plot_curves(summary, curves)
  return text, [markdown, diffs, curves]


def _format(value, spec: str, unit: str = "") -> str:
  return NOT_RUN if value is None else format(value, spec) + unit


def _align(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
  return [cells[0].ljust(widths[0])] + [
    cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)
  ]
