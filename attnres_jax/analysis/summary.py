"""Result lines gathered into the rows of an ablation table.

Losses are in nats per token; differences are from the baseline, paired by
seed: negative is better.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of an ablation table over its seeds; None where nothing ran.

  Attributes:
    key: short name, as in --rows.
    name: the paper's name.
    paper_loss: the paper's validation loss, nats per token.
    paper_diff: paper_loss minus the paper's baseline.
    losses: our validation loss by seed, nats per token.
    diffs: our loss minus our baseline's, by seed, for seeds that both ran.
    bpb: bits per byte, mean over seeds.
    params: number of parameters.
    throughput_ratio: tokens per second relative to the baseline.
    compile_s: seconds to compile the training and evaluation steps.
    peak_mib: memory of the compiled training step, MiB.
    curves: validation loss by seed, as (step, loss) pairs.
  """

  key: str
  name: str
  paper_loss: float
  paper_diff: float
  losses: dict[int, float]
  diffs: dict[int, float]
  bpb: float | None
  params: int | None
  throughput_ratio: float | None
  compile_s: float | None
  peak_mib: float | None
  curves: dict[int, list[tuple[int, float]]]

  @property
  def loss(self) -> float | None:
    return mean(self.losses.values())

  @property
  def diff(self) -> float | None:
    return mean(self.diffs.values())

  @property
  def diff_std(self) -> float | None:
    """Sample standard deviation of the paired differences, from 2 seeds on."""
    if len(self.diffs) < 2:
      return None
    return statistics.stdev(self.diffs.values())


def summarize(rows: Sequence[Mapping], lines: Sequence[Mapping]) -> list[Row]:
  """Gathers result lines into table rows.

  Args:
    rows: key, name and paper_loss of every row in the table's order; the first
      one is the baseline. Rows without a line stay in the table.
    lines: result lines of one config; at most one per row and seed.
  """
  baseline = rows[0]
  base = {
    line["seed"]: line["val_loss"]
    for line in lines
    if line["key"] == baseline["key"]
  }
  summary = []
  for row in rows:
    own = sorted(
      (line for line in lines if line["key"] == row["key"]),
      key=lambda line: line["seed"],
    )
    losses = {line["seed"]: line["val_loss"] for line in own}
    peak = mean([x["peak_bytes"] for x in own if x["peak_bytes"] is not None])
    summary.append(
      Row(
        key=row["key"],
        name=row["name"],
        paper_loss=row["paper_loss"],
        paper_diff=row["paper_loss"] - baseline["paper_loss"],
        losses=losses,
        diffs={s: loss - base[s] for s, loss in losses.items() if s in base},
        bpb=mean([x["val_bpb"] for x in own]),
        params=own[0]["params"] if own else None,
        throughput_ratio=mean(
          [
            x["throughput_ratio"]
            for x in own
            if x["throughput_ratio"] is not None
          ]
        ),
        compile_s=mean([x["compile_s"] for x in own]),
        peak_mib=None if peak is None else peak / 2**20,
        curves={x["seed"]: x.get("val_curve", []) for x in own},
      )
    )
  return summary


def mean(values: Iterable[float]) -> float | None:
  """The mean, or None of nothing."""
  values = list(values)
  return statistics.fmean(values) if values else None
