"""Trains one model, or continues to train it.

  python -m scripts.train --config=configs/train.py:mixer=block,size=tiny \
    --workdir=runs/block

  python -m scripts.train --config=configs/train.py:mixer=full,size=small \
    --config.run.steps=1000 --config.opt.lr=3e-3 --workdir=runs/full

The text after the colon picks the experiment: mixer=NAME, size=NAME (micro,
tiny, small, 436m), data=NAME (sotu, pycode, files, hf). Single values are set
with --config.GROUP.KEY=VALUE; configs/train.py lists them all. The same command
again continues a run exactly, and only tells the result of a finished one.
Ctrl-C and SIGTERM save after the current step.

Several processes train together: on Cloud TPU the same command on every host is
all, elsewhere each is told where process 0 is and which one it is,

  ... --coordinator=HOST:PORT --num_processes=2 --process_id=0

with one --workdir for all, a folder that every host sees. A run may continue on
another number of processes or devices.

Exit code: 0 finished; 1 the loss is not finite; 2 a flag, config, folder or the
data is wrong, or the processes do not come together; 130 and 143 after Ctrl-C
and SIGTERM.
"""

import jax
from absl import flags

from attnres_jax import cli
from attnres_jax.errors import UserError
from attnres_jax.train import loop
from attnres_jax.train.program import parameter_table

_CONFIG = cli.define_config("configs/train.py", "FILE:ARGUMENTS, see above.")
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder of the run: checkpoints, metrics.jsonl, ..."
)
_DESCRIBE = flags.DEFINE_bool(
  "describe", False, "Print config and parameters, and train nothing."
)

_JOIN = cli.define_processes()


def main(argv) -> int:
  del argv
  config = _CONFIG.value
  if _DESCRIBE.value:
    print(config)
    print(parameter_table(config))
    return 0
  if not _WORKDIR.value:
    raise UserError(
      "got no --workdir: expected the folder that the run is kept in, such as"
      " --workdir=runs/block."
    )
  _JOIN(config, workdir=_WORKDIR.value)
  summary = loop.train(config, _WORKDIR.value, say=print)
  if jax.process_index() == 0:
    print(summary.text())
    if summary.interrupted:
      print("Stopped before the end, saved: the same command continues.")
    else:
      print(
        f"Metrics: {_WORKDIR.value}/metrics.jsonl and, for TensorBoard, beside."
      )
  return 128 + summary.signal if summary.interrupted else 0


if __name__ == "__main__":
  cli.run(main)
