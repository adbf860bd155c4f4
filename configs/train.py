"""One training run: a dense decoder with one residual mechanism.

  python -m scripts.train --config=configs/train.py:mixer=block,size=tiny \
    --workdir=runs/block

The argument string picks *which experiment* (`mixer`, `size`, `data`); single
values are overridden with `--config.group.key=value`. Paper numbers are in
configs/ablation.py beside the rows that they belong to.
"""

from ml_collections import ConfigDict

from attnres_jax.depth_mixing import registry
from attnres_jax.errors import unknown_name
from configs.common import parse_arg

# Widths and depths; `layers` counts Transformer blocks, so a model has
# 2 * layers sublayers. `436m` is the row of the paper's Table 2 that its
# ablations use (16 blocks, 16 heads, d 1168, lr 2.2e-3, 384 sequences of 8192
# tokens, 27.9k steps). The paper gives no head dim (128 is Kimi Linear's), and
# about 9 experts of 528 channels are active per token: one dense MLP here.
# `7b` has the sizes of Mistral 7B (arXiv:2310.06825, Table 1) and, like Llama 2
# 7B (arXiv:2307.09288, section 2.2), lr 3e-4, 2000 warm-up steps, 4M tokens per
# step and 2T tokens in all.
COMMON = dict(  # unless a size says
  head_dim=0, dtype="float32", remat="none", vocab_size=2048
)  # fmt: skip
SIZES = {
  "micro": dict(
    layers=3, width=32, heads=4, kv_heads=2, mlp_hidden=64,
    seq_len=32, batch_size=4, steps=8, lr=1e-2, warmup_steps=2,
    eval_sequences=8, eval_every=4, checkpoint_every=4,
  ),
  "tiny": dict(
    layers=8, width=64, heads=4, kv_heads=2, mlp_hidden=128,
    seq_len=128, batch_size=4, steps=450, lr=8e-3, warmup_steps=45,
    eval_sequences=64, eval_every=50, checkpoint_every=150,
  ),
  "small": dict(
    layers=16, width=96, heads=4, kv_heads=2, mlp_hidden=256,
    seq_len=256, batch_size=4, steps=500, lr=6e-3, warmup_steps=50,
    eval_sequences=128, eval_every=50, checkpoint_every=250,
  ),
  "436m": dict(
    layers=16, width=1168, heads=16, kv_heads=16, head_dim=128,
    mlp_hidden=4752, dtype="bfloat16", remat="sublayer",
    seq_len=8192, batch_size=384, steps=27_900, lr=2.2e-3, warmup_steps=1000,
    eval_sequences=1024, eval_every=500, checkpoint_every=500,
  ),
  "7b": dict(
    layers=32, width=4096, heads=32, kv_heads=8, head_dim=128,
    mlp_hidden=14336, dtype="bfloat16", remat="sublayer", vocab_size=32_000,
    seq_len=8192, batch_size=512, steps=477_000, lr=3e-4, warmup_steps=2000,
    eval_sequences=1024, eval_every=1000, checkpoint_every=1000,
  ),
}  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
  """Builds the config of one run.

  Args:
    arg: `mixer=NAME,size=NAME,data=NAME`, each optional.

  Returns:
    A locked config with the groups data, model, mixer, opt, mesh and run.

  Raises:
    ValueError: an unknown key, mixer or size.
  """
  parsed = parse_arg(arg, mixer="block", size="tiny", data="sotu")
  if parsed["size"] not in SIZES:
    raise unknown_name(
      "size", parsed["size"], SIZES, "--config=configs/train.py:size=NAME"
    )
  size = COMMON | SIZES[parsed["size"]]
  c = ConfigDict()

  c.data = d = ConfigDict()
  # Corpus: sotu (shipped) | pycode (scripts/fetch_pycode.py) | files | hf.
  d.source = parsed["data"]
  d.path = (
    ""  # files: a file, folder or glob; pycode: folder; hf: name or folder
  )
  d.hf_config = ""  # hf: the dataset's configuration, e.g. sample-10BT
  d.hf_split = "train"  # hf: the split that training streams from
  d.text_key = "text"  # JSONL, Parquet, hf: the field that holds the text
  d.tokenizer = ""  # a tokenizer.json; empty: the corpus's own, trained once
  d.vocab_size = size["vocab_size"]  # entries of a tokenizer trained here
  d.seq_len = size["seq_len"]  # tokens per sequence
  d.batch_size = size["batch_size"]  # sequences per optimizer step, all hosts
  d.eval_sequences = size["eval_sequences"]  # sequences of the validation set
  d.val_percent = 5  # documents held out for validation, per cent
  d.prefetch = 8  # batches prepared ahead of the step

  c.model = m = ConfigDict()
  m.layers = size["layers"]  # Transformer blocks; sublayers = 2 * layers
  m.width = size["width"]  # D, channels
  m.heads = size["heads"]  # N, query heads; must divide width
  m.head_dim = size["head_dim"]  # H, channels per head; 0: width / heads
  m.kv_heads = size["kv_heads"]  # K, key/value heads; must divide heads
  m.mlp_hidden = size["mlp_hidden"]  # F, channels inside SwiGLU
  m.vocab_size = d.get_ref("vocab_size")  # V, rows of the embedding
  m.rope_theta = 10_000.0  # RoPE base; 0.0: no positional encoding (NoPE)
  m.qk_norm = True  # RMSNorm on queries and keys, per head
  m.tied_head = True  # the head is the embedding, transposed
  m.norm_eps = 1e-5  # added to the mean square inside every RMSNorm
  m.init_std = 0.02  # embedding; kernels use 1 / sqrt(fan in)
  m.dtype = size["dtype"]  # of activations: float32 | bfloat16
  m.remat = size["remat"]  # backward recomputes: none | sublayer | block

  c.mixer = ConfigDict(
    dict(name=parsed["mixer"], **registry.default_options(parsed["mixer"]))
  )

  c.opt = o = ConfigDict()
  o.lr = size["lr"]  # peak learning rate
  o.warmup_steps = size["warmup_steps"]  # linear, optimizer steps
  o.min_lr_ratio = 0.1  # final over peak learning rate, cosine
  o.b1 = 0.9  # AdamW
  o.b2 = 0.95  # AdamW
  o.eps = 1e-8  # AdamW
  o.weight_decay = 0.1  # on kernels and embeddings only
  o.clip_norm = 1.0  # global gradient norm, computed in float32; 0.0: off
  o.accumulate = 1  # microbatches per optimizer step; must divide batch_size
  o.z_loss = 0.0  # coefficient of mean log(sum exp logits)^2
  o.mixer_lr_multiplier = 1.0  # on the learning rate of the mixer's parameters

  c.mesh = ConfigDict()
  # Devices along each axis; -1 (one axis at most): the rest of them. What is
  # split over which axis: attnres_jax/parallel/rules.py.
  c.mesh.data = -1  # batch
  c.mesh.fsdp = 1  # batch, and storage of parameters and optimizer state
  c.mesh.expert = 1  # batch, and experts
  c.mesh.seq = 1  # sequence
  c.mesh.tensor = 1  # heads and MLP channels; between sublayers, sequence

  c.run = r = ConfigDict()
  r.seed = 0  # fixes init, data order and everything else
  r.steps = size["steps"]  # optimizer steps
  r.log_every = 10  # steps between lines of metrics.jsonl
  r.eval_every = size["eval_every"]  # steps; also at the last step
  r.checkpoint_every = size["checkpoint_every"]  # steps; also at the last step
  r.keep_checkpoints = 2  # newest ones that stay on disk
  r.tensorboard = True  # also write TensorBoard event files
  r.progress = True  # progress bar on standard error
  c.lock()
  return c
