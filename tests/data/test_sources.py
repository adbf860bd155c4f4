"""Files of every kind, and what is wrong with some of them."""

import gzip
import json
import lzma
import re
import sys

import pyarrow as pa
import pytest
from array_record.python import array_record_module
from pyarrow import parquet

from attnres_jax.data import corpora, readers
from attnres_jax.errors import UserError
from tests.data.test_batches import is_training


def read(path, text_key="text"):
  return [d.text for d in readers.read(readers.expand(str(path)), text_key)]


def write_array_record(path, records):
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for record in records:
    writer.write(record)
  writer.close()


def lines(texts, key="text"):
  return "".join(json.dumps({"id": 1, key: t}) + "\n" for t in texts).encode()


@pytest.fixture
def folder(tmp_path, texts):
  """The documents, ten in each kind of file, in nested folders."""
  (tmp_path / "b" / ".hidden").mkdir(parents=True)
  (tmp_path / "b" / ".hidden" / "no.txt").write_text("not this")
  (tmp_path / "README.md").write_text("nor this")
  for i, text in enumerate(texts[:10]):
    (tmp_path / f"{i}.txt").write_text(text, newline="")
  (tmp_path / "a.jsonl").write_bytes(lines(texts[10:20]))
  (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(texts[20:30])))
  (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines(texts[30:40])))
  table = pa.table({"n": list(range(10)), "text": texts[40:50]})
  parquet.write_table(table, tmp_path / "b" / "c.parquet")
  records = [t.encode() for t in texts[50:55]]
  records += lines(texts[55:]).splitlines()
  write_array_record(tmp_path / "b" / "d.array_record", records)
  return tmp_path


def test_a_folder_of_everything(folder, texts):
  assert sorted(read(folder)) == sorted(texts)
  assert sorted(read(f"{folder}/**/*.jsonl*")) == sorted(texts[10:40])


@pytest.mark.parametrize(
  "pattern", ["*.txt", "*/*.parquet", "*/*.array_record"]
)
def test_training_from(folder, load, take, pattern):
  path = f"{folder}/{pattern}"
  dataset = load(path=path, val_percent=50, seq_len=4, batch_size=1)
  assert dataset.describe()["train_documents"] > 0
  assert take(dataset, 2)[0][0]["mask"].sum() > 0


def test_other_text_key(tmp_path, texts):
  (tmp_path / "a.jsonl").write_bytes(lines(texts, key="content"))
  assert read(tmp_path / "a.jsonl", "content") == texts


def test_nulls_and_blank_lines_are_no_documents(tmp_path):
  rows = b'\n{"text": null}\n{"text": " \\n"}\n{"text": "yes"}\n\n'
  (tmp_path / "a.jsonl").write_bytes(rows)
  assert read(tmp_path / "a.jsonl") == ["yes"]


@pytest.mark.fast
@pytest.mark.parametrize("joint", ["\n\n", "\n \t\n\n", "\r\n\r\n", "\n"])
def test_a_lone_text_file_is_cut(tmp_path, joint):
  paragraphs = [f"{i} " + "word " * 50 for i in range(200)]
  (tmp_path / "book.txt").write_text(joint.join(paragraphs), newline="")
  cut = read(tmp_path / "book.txt")
  assert [len(piece) >= readers.PIECE_CHARACTERS for piece in cut[:-1]] == (
    [True] * (len(cut) - 1)
  )
  assert 10 < len(cut) < 15
  together = " ".join(cut).split()
  assert together == " ".join(paragraphs).split()


def test_a_lone_text_file_trains(tmp_path, load):
  text = "\n\n".join(f"{i} " + "word " * 50 for i in range(1000))
  (tmp_path / "book.txt").write_text(text)
  facts = load(path=tmp_path / "book.txt").describe()
  assert facts["train_documents"] > facts["val_documents"] > 0


def bad_parquet(path):
  parquet.write_table(pa.table({"words": ["a"], "n": [1]}), path)


BAD = [
  ("a.txt", b"", "is empty"),
  ("a.txt", b"caf\xe9 au lait", r"a\.txt is not UTF-8 text \(byte 3\)"),
  ("a.txt", b"\x7fELF\0\0\0", "a.txt is binary"),
  ("a.bin", b"text", r"a\.bin.*expected \.txt, \.jsonl"),
  ("a.txt", b"  \n \n", "no usable documents"),
  ("a.txt", b"only one", "1 usable document in"),
  ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl:2: bad JSON"),
  ("a.jsonl", b'\n{"txt": "a"}\n', r"a\.jsonl:2: got 'txt', expected .*'text'"),
  ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: got \['text'\]"),
  ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl:1: field 'text' is a int"),
  ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl:1: .*surrogate"),
  ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1 is not UTF-8"),
  ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz: cannot decompress"),
  ("a.jsonl.gz", gzip.compress(b"x" * 999)[:-9], "cannot decompress"),
  ("a.jsonl.xz", b"no xz", r"a\.jsonl\.xz: cannot decompress"),
  ("a.parquet", b"no parquet", "a.parquet is not a Parquet file"),
  ("a.parquet", bad_parquet, "got the columns words, n, expected 'text'"),
  ("a.array_record", b"no records", "is not an ArrayRecord file"),
]


@pytest.mark.parametrize("name, content, message", BAD)
def test_bad_files(tmp_path, load, name, content, message):
  path = tmp_path / name
  content(path) if callable(content) else path.write_bytes(content)
  with pytest.raises(UserError, match=message) as error:
    load(path=path)
  assert "\n" not in str(error.value)
  assert "--config.data." in str(error.value)


@pytest.mark.parametrize("record", [b'{"txt": 1}', b"\xff\xfe"])
def test_bad_array_records(tmp_path, load, record):
  write_array_record(tmp_path / "a.array_record", [b"good", record])
  with pytest.raises(UserError, match=r"a\.array_record, record 1"):
    load(path=tmp_path / "a.array_record")


def test_nothing_of_a_bad_corpus_stays_in_the_cache(tmp_path, load, cache):
  before = sorted(cache.rglob("*"))
  (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' * 9 + b"{")
  with pytest.raises(UserError):
    load(path=tmp_path / "a.jsonl")
  after = [p for p in sorted(cache.rglob("*")) if p not in before]
  assert [p for p in after if p.is_file()] == []


CONFIGS = [
  (dict(path=""), "got no data.path"),
  (dict(path="/does/not/exist"), "'/does/not/exist' does not exist"),
  (dict(path="/does/not/*.txt"), "holds no usable files"),
  (dict(source="stou"), "unknown data source 'stou'.*Did you mean 'sotu'"),
  (dict(batch_size=400), "expected at least one batch of 400 x 32"),
  (dict(batch_size=6, process_count=4), "batch_size 6 for 4 processes"),
  (dict(vocab_size=256), "data.vocab_size 256: expected at least 257"),
  (dict(tokenizer="/no/t.json"), "data.tokenizer '/no/t.json' does not exist"),
  (dict(tokenizer="setup.py"), "'setup.py' is not a tokenizer.json"),
  (
    dict(source="pycode", path="/none"),
    "no pycode corpus in '/none'.*fetch_pyc",
  ),
]


@pytest.mark.parametrize("change, message", CONFIGS, ids=lambda v: str(v)[:40])
def test_bad_configs(jsonl, load, make_config, change, message):
  source = change.get("source", "files")
  if source == "stou":
    make = make_config
    from attnres_jax import data

    def load(path, **kwargs):
      config = make(path=path)
      config.source = source
      return data.load(config, 0)

    change = {}
  with pytest.raises(UserError, match=message) as error:
    load(**{"path": jsonl, **change})
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "percent, message",
  [
    (1, r"holds out none of the \d\d documents .*expected more \((\d+) holds"),
    (99, r"holds out all of the \d\d documents .*expected less"),
  ],
)
def test_empty_sides(tmp_path, load, texts, percent, message):
  one_side = [t for t in texts if is_training(t, percent) == (percent == 1)]
  assert len(one_side) > 50
  (tmp_path / "a.jsonl").write_bytes(lines(one_side))
  with pytest.raises(UserError, match=message) as error:
    load(path=tmp_path / "a.jsonl", val_percent=percent)
  if percent == 1:  # The share that it names is the smallest that will do.
    enough = int(re.search(message, str(error.value)).group(1))
    load(path=tmp_path / "a.jsonl", val_percent=enough)
    with pytest.raises(UserError, match="holds out none"):
      load(path=tmp_path / "a.jsonl", val_percent=enough - 1)


def test_tokenizer_without_an_end(load, jsonl, tmp_path):
  path = tmp_path / "t.json"
  import tokenizers

  tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(path))
  with pytest.raises(UserError, match="a token that ends a document"):
    load(path=jsonl, tokenizer=str(path))


def test_damaged_asset(monkeypatch, tmp_path):
  packed = bytearray(corpora.SOTU.read_bytes())
  packed[1000] ^= 1
  (tmp_path / "sotu").write_bytes(packed)
  for path in (tmp_path / "sotu", tmp_path / "none"):
    monkeypatch.setattr(corpora, "SOTU", path)
    with pytest.raises(UserError, match="is damaged"):
      list(corpora.sotu().documents())


def test_cache_that_cannot_be_written(load, jsonl, monkeypatch, tmp_path):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "file" / "cache"))
  with pytest.raises(UserError, match="ATTNRES_CACHE"):
    load(path=jsonl)


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_missing_extra(load, monkeypatch, tmp_path, package):
  monkeypatch.setitem(sys.modules, package, None)
  (tmp_path / "a.parquet").write_bytes(b"x")
  source = "files" if package == "pyarrow" else "hf"
  path = tmp_path / ("a.parquet" if package == "pyarrow" else "")
  with pytest.raises(UserError, match=r"pip install 'attnres_jax\[hf\]'"):
    load(source, path=path)
