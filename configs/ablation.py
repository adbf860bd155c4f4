"""The paper's two ablations: Table 4 (12 variants) and Figure 6 (block size).

  python -m scripts.ablate --config=configs/ablation.py:table4,size=tiny

A table is data: one entry per row, in the paper's order, with the paper's name
and validation loss and the mixer that stands for it here. Everything else is
`base`, the run of configs/train.py, and is the same in every row, so rows
differ in nothing but the mixer. Paper: arXiv:2603.15031, section 5.3; its
losses come from the 436M model of its Table 2 (16 Transformer blocks).

`--config.base.run.steps=300` changes every row;
`--config.rows.block.mixer.block_size=8` changes one.
"""

from ml_collections import ConfigDict

from attnres_jax.depth_mixing import registry
from attnres_jax.errors import UserError, unknown_name
from configs import train
from configs.common import parse_arg

# The first row of a table is the one that differences are taken from. Rows
# marked `core` run several seeds at size `small`: the ones that the paper's
# claims rest on.
TABLES = {
  "table4": [
    dict(
      key="baseline",
      name="Baseline (PreNorm)",
      paper_loss=1.766,
      mixer=dict(name="residual"),
      core=True,
    ),
    dict(
      key="denseformer",
      name="DenseFormer",
      paper_loss=1.767,
      mixer=dict(name="denseformer"),
      core=True,
    ),
    dict(
      key="mhc",
      name="mHC",
      paper_loss=1.747,
      mixer=dict(name="mhc"),
      core=True,
    ),
    dict(
      key="full",
      name="AttnRes Full",
      paper_loss=1.737,
      mixer=dict(name="full"),
      core=True,
    ),
    dict(
      key="full_input_query",
      name="Full, input-dependent query",
      paper_loss=1.731,
      mixer=dict(name="full", query="input"),
    ),
    dict(
      key="full_no_query",
      name="Full, input-independent mixing",
      paper_loss=1.749,
      mixer=dict(name="full", query="none"),
    ),
    dict(
      key="full_sigmoid",
      name="Full, sigmoid",
      paper_loss=1.741,
      mixer=dict(name="full", activation="sigmoid"),
    ),
    dict(
      key="full_no_key_norm",
      name="Full, no RMSNorm on keys",
      paper_loss=1.743,
      mixer=dict(name="full", key_norm=False),
    ),
    dict(
      key="swa",
      name="SWA (W = 1+8)",
      paper_loss=1.764,
      mixer=dict(name="sliding_window", window=8),
    ),
    dict(
      key="block",
      name="Block (S=4)",
      paper_loss=1.746,
      mixer=dict(name="block", block_size=4),
      core=True,
    ),
    dict(
      key="block_heads",
      name="Block, multihead (H=16)",
      paper_loss=1.752,
      mixer=dict(name="block", block_size=4, heads=16),
    ),
    dict(
      key="block_no_key_norm",
      name="Block, no RMSNorm on keys",
      paper_loss=1.750,
      mixer=dict(name="block", block_size=4, key_norm=False),
    ),
  ],
  "figure6": [
    dict(
      key="baseline",
      name="Baseline (PreNorm)",
      paper_loss=1.766,
      mixer=dict(name="residual"),
      core=True,
    ),
    *(
      dict(
        key=f"block_{block_size}",
        name=f"Block (S={block_size})" + (" = Full" * (block_size == 1)),
        paper_loss=paper_loss,
        mixer=dict(name="block", block_size=block_size),
        core=True,
      )
      for block_size, paper_loss in [
        (1, 1.737),
        (2, 1.746),
        (4, 1.746),
        (8, 1.748),
        (16, 1.753),
        (32, 1.757),
      ]
    ),
  ],
}


def get_config(arg: str | None = None) -> ConfigDict:
  """Builds the config of one table.

  Args:
    arg: `TABLE,size=NAME,data=NAME,seeds=N`, each optional; size and data as
      in configs/train.py; seeds=N runs the seeds 0..N-1 of every row.

  Returns:
    A locked config: `base` (groups of configs/train.py without the mixer),
    `order` (row keys, as in the paper), `rows` (by key: name, paper_loss,
    seeds, mixer) and `timing`.

  Raises:
    ValueError: an unknown key, table or size, or a negative number of seeds.
  """
  parsed = parse_arg(arg, table="table4", size="tiny", data="sotu", seeds=0)
  knob = "--config=configs/ablation.py:TABLE,size=NAME,seeds=N"
  if parsed["table"] not in TABLES:
    raise unknown_name("table", parsed["table"], TABLES, knob)
  if parsed["size"] not in train.SIZES:
    raise unknown_name("size", parsed["size"], train.SIZES, knob)
  if parsed["seeds"] < 0:
    raise UserError(
      f"seeds={parsed['seeds']}: expected a count, or 0 for each row's own"
      f" number. Set it with {knob}."
    )
  table = TABLES[parsed["table"]]
  c = ConfigDict()
  c.table = parsed["table"]
  c.size = parsed["size"]

  c.base = train.get_config(f"size={parsed['size']},data={parsed['data']}")
  with c.base.unlocked():
    del c.base.mixer  # the rows' business

  c.order = tuple(row["key"] for row in table)
  c.rows = ConfigDict()
  for row in table:
    name = row["mixer"]["name"]
    own = 3 if parsed["size"] == "small" and row.get("core") else 1
    c.rows[row["key"]] = ConfigDict(
      dict(
        name=row["name"],  # as the paper prints it
        paper_loss=row["paper_loss"],  # nats per token, the paper's model
        seeds=parsed["seeds"] or own,  # runs seeds 0..seeds-1
        mixer=dict(registry.default_options(name), **row["mixer"]),
      )
    )

  c.timing = ConfigDict()
  c.timing.rounds = 8  # pairs of steps (row, baseline) behind a throughput
  c.timing.max_seconds = 20.0  # stop timing a row earlier, after 3 pairs
  c.lock()
  return c
