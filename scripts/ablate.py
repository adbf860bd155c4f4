"""Trains an ablation table of the paper and prints it beside the paper's.

  python -m scripts.ablate --config=configs/ablation.py:table4,size=tiny

Finished runs are skipped, unfinished ones continue, so the same command can be
given again at any time. Ctrl-C saves the current run and prints the table so
far. Exit code: 0 done; 1 a row failed; 2 a flag, config or the data is wrong;
130 and 143 after Ctrl-C and SIGTERM.
"""

import jax
from absl import flags

from attnres_jax import cli
from attnres_jax.analysis.ablation import Ablation

_CONFIG = cli.define_config(
  "configs/ablation.py:table4,size=tiny",
  "FILE:TABLE,size=SIZE,data=NAME,seeds=N. Tables: table4, figure6. Sizes: tiny"
  " (minutes), small (hours), 436m (the paper's; a pod). seeds=N runs seeds"
  " 0..N-1 of every row; --config.base.GROUP.KEY=VALUE changes all rows.",
)
_ROWS = flags.DEFINE_list(
  "rows", [], "Run only these rows, by key; --list shows the keys."
)
_LIST = flags.DEFINE_bool(
  "list", False, "Print the rows with their mixers, and run nothing."
)
_REPORT_ONLY = flags.DEFINE_bool(
  "report_only",
  False,
  "Make table and figures from the result file again, and run nothing.",
)
_RUNS_DIR = flags.DEFINE_string(
  "runs_dir", "runs", "Folder for checkpoints and metrics of the runs."
)
_RESULTS_DIR = flags.DEFINE_string(
  "results_dir", "results", "Folder for result lines, table and figures."
)


def main(argv) -> int:
  del argv
  # Compile seconds are a column of the table: no program from an earlier day.
  jax.config.update("jax_enable_compilation_cache", False)
  ablation = Ablation(
    _CONFIG.value, _ROWS.value, _RUNS_DIR.value, _RESULTS_DIR.value
  )
  if _LIST.value:
    print(ablation.listing())
    return 0
  outcome = None if _REPORT_ONLY.value else ablation.run()
  text, paths = ablation.report()
  print(f"\n{text}")
  print("Written:", *paths, ablation.path)
  if outcome is None:
    return 0
  for label, reason in outcome.failures.items():
    print(f"FAILED: {label}: {reason}")
  if outcome.signal:
    print("Stopped before the end, saved: the same command continues.")
    return 128 + outcome.signal
  return 1 if outcome.failures else 0


if __name__ == "__main__":
  cli.run(main)
