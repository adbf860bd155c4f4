"""The repository's shape: imports, configs, the paper's numbers, file sizes."""

import ast
import importlib
import pathlib
import sys

import pytest

from attnres_jax.config import validate
from attnres_jax.depth_mixing import registry
from attnres_jax.errors import UserError
from configs import ablation, train

REPO = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted(
  path.relative_to(REPO)
  for folder in ("kernels", "attnres_jax", "configs", "scripts")
  for path in (REPO / folder).rglob("*.py")
)

# What each part of the package may import of the others, itself aside.
BASIC = {"errors", "shapes"}
MAY_IMPORT = {
  "errors": set(),
  "shapes": set(),
  "provenance": set(),
  "depth_mixing": BASIC,
  "model": BASIC | {"depth_mixing"},
  "parallel": BASIC | {"depth_mixing", "model"},
  "data": BASIC,
  "config": BASIC | {"depth_mixing"},
  "train": BASIC
  | {"depth_mixing", "model", "parallel", "data", "config", "provenance"},
  "infer": BASIC | {"depth_mixing", "model", "parallel"},
  "cli": BASIC | {"data", "parallel", "provenance", "train"},
  "analysis": BASIC
  | {"depth_mixing", "model", "data", "config", "provenance"}
  | {"infer", "parallel", "train"},
}

# The folder `kernels` is the package attnres_kernels, which stands alone.
KERNELS = "attnres_kernels"
KERNELS_MAY_IMPORT = sys.stdlib_module_names | {"jax", "numpy", "jaxtyping"}
MAY_IMPORT_KERNELS = {"depth_mixing", "model", "analysis"}

# arXiv:2603.15031v1, Table 4 and Figure 6, typed from the paper.
TABLE_4 = {
  "Baseline (PreNorm)": 1.766,
  "DenseFormer": 1.767,
  "mHC": 1.747,
  "AttnRes Full": 1.737,
  "Full, input-dependent query": 1.731,
  "Full, input-independent mixing": 1.749,
  "Full, sigmoid": 1.741,
  "Full, no RMSNorm on keys": 1.743,
  "SWA (W = 1+8)": 1.764,
  "Block (S=4)": 1.746,
  "Block, multihead (H=16)": 1.752,
  "Block, no RMSNorm on keys": 1.750,
}
FIGURE_6 = {1: 1.737, 2: 1.746, 4: 1.746, 8: 1.748, 16: 1.753, 32: 1.757}


def _imports(path):
  """Full names of the modules that a file imports, also inside functions."""
  for node in ast.walk(ast.parse((REPO / path).read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      for alias in node.names:
        yield f"{node.module}.{alias.name}"


def _part(name):
  """`depth_mixing` of attnres_jax.depth_mixing.base; None if not ours."""
  words = name.split(".")
  return words[1] if words[0] == "attnres_jax" and len(words) > 1 else None


@pytest.mark.fast
@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_go_one_way(path):
  top = path.parts[0]
  if top == "scripts":
    return
  packages = {name.split(".")[0] for name in _imports(path)}
  if top == "kernels":
    assert packages <= KERNELS_MAY_IMPORT | {KERNELS}
    return
  ours = {_part(name) for name in _imports(path)} - {None}
  if top == "configs":
    assert ours <= {"depth_mixing", "errors"} and KERNELS not in packages
    return
  assert "configs" not in packages
  if path.name == "__init__.py" and len(path.parts) == 2:
    return
  part = path.parts[1].removesuffix(".py")
  assert ours <= MAY_IMPORT[part] | {part}
  assert KERNELS not in packages or part in MAY_IMPORT_KERNELS


@pytest.mark.fast
def test_the_oracle_shares_nothing():
  """reference.py imports nothing of ours but the types."""
  path = pathlib.Path("kernels", "depth_attention", "reference.py")
  ours = {n.rpartition(".")[0] for n in _imports(path) if KERNELS in n}
  assert ours == {f"{KERNELS}.depth_attention.types"}


@pytest.mark.fast
@pytest.mark.parametrize(
  "path", [path for path in SOURCES if path.parts[0] != "scripts"], ids=str
)
def test_every_module_imports(path):
  top, *parts = path.with_suffix("").parts
  parts = (KERNELS if top == "kernels" else top, *parts)
  importlib.import_module(".".join(parts).removesuffix(".__init__"))


def test_every_script_imports(run_python):
  names = [f"scripts.{p.stem}" for p in SOURCES if p.parts[0] == "scripts"]
  assert "scripts.ablate" in names and "scripts.train" in names
  # Scripts define flags of the same names: forget them in between.
  run_python(
    f"""
import importlib
from absl import flags
before = set(flags.FLAGS)
for name in {names}:
  importlib.import_module(name)
  for flag in set(flags.FLAGS) - before:
    delattr(flags.FLAGS, flag)
""",
    devices=1,
  )


@pytest.mark.fast
@pytest.mark.parametrize("size", train.SIZES)
@pytest.mark.parametrize("mixer", registry.MIXERS)
def test_every_training_config_is_valid(mixer, size):
  validate(train.get_config(f"mixer={mixer},size={size}"))


@pytest.mark.fast
@pytest.mark.parametrize("size", train.SIZES)
@pytest.mark.parametrize("table", ablation.TABLES)
def test_every_ablation_row_is_valid(table, size):
  from attnres_jax.analysis.ablation import run_config

  config = ablation.get_config(f"{table},size={size}")
  for key in config.order:
    validate(run_config(config, key, seed=0))


@pytest.mark.fast
def test_rows_and_losses_are_the_papers():
  config = ablation.get_config("table4")
  rows = [config.rows[key] for key in config.order]
  assert {row.name: row.paper_loss for row in rows} == TABLE_4
  assert [row.name for row in rows] == list(TABLE_4)
  config = ablation.get_config("figure6")
  rows = [config.rows[key] for key in config.order]
  assert rows[0].paper_loss == TABLE_4["Baseline (PreNorm)"]
  assert {r.mixer.block_size: r.paper_loss for r in rows[1:]} == FIGURE_6


@pytest.mark.fast
def test_seeds_of_the_rows():
  small = ablation.get_config("table4,size=small")
  assert {key: small.rows[key].seeds for key in small.order} == {
    "baseline": 3,
    "denseformer": 3,
    "mhc": 3,
    "full": 3,
    "full_input_query": 1,
    "full_no_query": 1,
    "full_sigmoid": 1,
    "full_no_key_norm": 1,
    "swa": 1,
    "block": 3,
    "block_heads": 1,
    "block_no_key_norm": 1,
  }
  tiny = ablation.get_config("table4,size=tiny")
  assert all(tiny.rows[key].seeds == 1 for key in tiny.order)
  five = ablation.get_config("table4,size=small,seeds=5")
  assert all(five.rows[key].seeds == 5 for key in five.order)


@pytest.mark.fast
@pytest.mark.parametrize(
  "arg, hint",
  [
    ("tabel4", "Did you mean 'table4'?"),
    ("table4,size=tinny", "Did you mean 'tiny'?"),
    ("table4,seeds=-1", "seeds=-1"),
  ],
)
def test_bad_ablation_arguments(arg, hint):
  with pytest.raises(UserError, match=hint.replace("?", r"\?")) as error:
    ablation.get_config(arg)
  assert "\n" not in str(error.value)


@pytest.mark.fast
def test_no_file_is_too_long():
  lengths = {
    path: len(path.read_text().splitlines())
    for path in REPO.rglob("*.py")
    if not any(part.startswith(".") for part in path.relative_to(REPO).parts)
  }
  assert {path: n for path, n in lengths.items() if n >= 500} == {}
