"""The ablation's figures, drawn from its summary rows."""

import os
from collections.abc import Sequence

from matplotlib.figure import Figure

from attnres_jax.analysis.summary import Row, mean


def plot_diffs(rows: Sequence[Row], path: str | os.PathLike) -> None:
  """Writes a PNG: differences from the baseline, the paper's beside ours."""
  figure = _figure(10, 1.6 + 0.36 * (len(rows) - 1))
  left, right = figure.subplots(1, 2, sharey=True)
  shown = rows[1:]
  for y, row in enumerate(shown):
    color = _color(y)
    left.plot([0, row.paper_diff], [y, y], color=color, lw=1.2, alpha=0.6)
    left.plot(row.paper_diff, y, "D", color=color, ms=7, mfc="white", mew=1.8)
    left.annotate(f"{row.paper_diff:+.3f}", **_beside(row.paper_diff, y))
    if row.diff is None:
      right.text(0, y, " not run", va="center", fontsize=8, color="gray")
      continue
    right.plot([0, row.diff], [y, y], color=color, lw=1.2, alpha=0.6)
    right.plot(list(row.diffs.values()), [y] * len(row.diffs), ".", color=color)
    right.errorbar(
      row.diff, y, xerr=row.diff_std, fmt="o", color=color, ms=7, capsize=3
    )
    edge = max(row.diffs.values()) if row.diff > 0 else min(row.diffs.values())
    if row.diff_std is not None:
      edge = (max if row.diff > 0 else min)(
        edge, row.diff + row.diff_std * (1 if row.diff > 0 else -1)
      )
    right.annotate(f"{row.diff:+.4f}", **_beside(edge, y, sign=row.diff))
  for axes, title in [
    (left, "the paper (436M parameters)"),
    (right, "here (dots: seeds, bars: ± one standard deviation)"),
  ]:
    axes.axvline(0, color="black", lw=0.8)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("validation loss minus baseline (nats per token)")
    axes.grid(axis="x", alpha=0.25)
    axes.margins(x=0.28)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
  left.set_yticks(range(len(shown)), [row.name for row in shown])
  left.set_ylim(len(shown) - 0.5, -0.5)
  figure.savefig(path, dpi=130)


def plot_curves(rows: Sequence[Row], path: str | os.PathLike) -> None:
  """Writes a PNG: validation loss by step, and its difference from baseline.

  Thin lines are seeds, thick ones their mean.
  """
  figure = _figure(12, 5)
  left, right = figure.subplots(1, 2)
  base = {seed: dict(curve) for seed, curve in rows[0].curves.items()}
  for i, row in enumerate(rows):
    style = dict(
      color="black" if i == 0 else _color(i - 1),
      ls=("-", "--")[(i > 0) * ((i - 1) // 10)],
    )
    diffs = {
      seed: [
        (step, loss - base[seed][step])
        for step, loss in curve
        if step in base.get(seed, {})
      ]
      for seed, curve in row.curves.items()
    }
    for axes, curves, label in [
      (left, row.curves, None),
      (right, diffs, row.name),
    ]:
      curves = [curve for curve in curves.values() if curve]
      if len(curves) > 1:
        for curve in curves:
          axes.plot(*zip(*curve, strict=True), lw=0.6, alpha=0.5, **style)
      mean = _mean_curve(curves)
      if mean:
        axes.plot(*zip(*mean, strict=True), lw=1.8, label=label, **style)
  left.set_ylabel("validation loss (nats per token)")
  right.set_ylabel("validation loss minus baseline (nats per token)")
  for axes in (left, right):
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
  if right.get_legend_handles_labels()[0]:
    right.legend(
      loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8
    )
  figure.savefig(path, dpi=130)


def _mean_curve(curves) -> list[tuple[int, float]]:
  """The mean at the steps that every curve has."""
  by_step = [dict(curve) for curve in curves]
  if not by_step:
    return []
  steps = sorted(set.intersection(*(set(curve) for curve in by_step)))
  return [(s, mean([curve[s] for curve in by_step])) for s in steps]


def _color(i: int) -> str:
  return f"C{i % 10}"


def _beside(x: float, y: float, sign: float | None = None) -> dict:
  """Arguments of a label on the far side of a point, seen from zero."""
  right = (x if sign is None else sign) > 0
  return dict(
    xy=(x, y),
    xytext=(9 if right else -9, 0),
    textcoords="offset points",
    ha="left" if right else "right",
    va="center",
    fontsize=8,
  )


def _figure(width: float, height: float):
  # Not pyplot: it keeps every figure alive and picks a GUI backend.
  return Figure(figsize=(width, height), layout="constrained")
