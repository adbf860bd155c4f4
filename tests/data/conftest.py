"""A cache of its own for the session, and small corpora."""

import json
import random

import pytest

from attnres_jax import data
from configs import train


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
  """Nothing is read from or written to the user's cache, or the network."""
  folder = tmp_path_factory.mktemp("cache")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("ATTNRES_CACHE", str(folder / "attnres"))
    patch.setenv("HF_HOME", str(folder / "hf"))
    patch.setenv("HF_HUB_OFFLINE", "1")
    yield folder / "attnres"


@pytest.fixture(scope="session")
def texts():
  """60 documents of very different lengths; the i-th begins with its marker.

  Accents and emoji take several bytes a character.
  """
  rng = random.Random(0)
  words = ["depth", "residual", "attention", "naïve", "Überraschung", "😀", "l"]
  words += ["layer", "stream", "query", "\n", "  ", "block", "sum", "norm"]
  lengths = [1, 2, 700, *(rng.randint(3, 120) for _ in range(57))]
  return [
    f"document-{i:02d}: {' '.join(rng.choices(words, k=n))}"
    for i, n in enumerate(lengths)
  ]


@pytest.fixture(scope="session")
def jsonl(texts, tmp_path_factory):
  """The documents as a JSONL file."""
  path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
  rows = [json.dumps({"text": text}) + "\n" for text in texts]
  path.write_text("".join(rows))
  return path


@pytest.fixture
def make_config():
  """make_config(source, **overrides) -> the group `data` of a micro run."""

  def make(source="files", **overrides):
    config = train.get_config(f"size=micro,data={source}").data
    small = {"val_percent": 20, "vocab_size": 300, "prefetch": 2}
    if source != "sotu":
      config.update(small)
    config.update(
      {k: str(v) if k == "path" else v for k, v in overrides.items()}
    )
    return config

  return make


@pytest.fixture
def load(make_config):
  """load(source, seed=0, process_index=0, process_count=1, **overrides)."""

  def load(
    source="files",
    seed=0,
    process_index=0,
    process_count=1,
    rows=None,
    **kwargs,
  ):
    config = make_config(source, **kwargs)
    return data.load(config, seed, process_index, process_count, rows)

  return load


@pytest.fixture
def take():
  """take(dataset, n, state=None) -> n batches, and the state after them."""

  def take(dataset, n, state=None):
    iterator = dataset.train_iterator()
    try:
      if state is not None:
        iterator.set_state(json.loads(json.dumps(state)))
      return [next(iterator) for _ in range(n)], iterator.get_state()
    finally:
      iterator.close()

  return take
