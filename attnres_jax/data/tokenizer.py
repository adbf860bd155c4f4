"""Byte-level BPE: training, loading and the bytes behind every id."""

import hashlib
import os
import pathlib
from collections.abc import Iterable

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from attnres_jax.errors import UserError

EOS = "<|endoftext|>"
# What other tokenizers call the token between documents.
EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
MIN_VOCAB = 257  # 256 bytes and EOS


class Tokenizer:
  """Text to ids and back.

  Attributes:
    vocab_size: ids are in [0, vocab_size).
    eos_id: the id that stands before and after every document.
    token_bytes: float32 [vocab_size], UTF-8 bytes that each id stands for;
      special tokens stand for none. Exact for byte-level BPE, also for tokens
      that end inside a character. For other kinds: U+2581 counts as a space
      and <0x0A> as one byte, and what a normaliser changes is not counted, so
      bits per byte are then approximate.
    sha256: of the serialised tokenizer.
  """

  def __init__(self, inner: tokenizers.Tokenizer, name: str):
    """Wraps a tokenizer of the `tokenizers` library.

    Args:
      inner: taken over, do not use it afterwards.
      name: where it came from, for messages.

    Raises:
      UserError: it has no token for the end of a document.
    """
    inner.no_truncation()
    inner.no_padding()
    # A document that quotes "<|endoftext|>" must not end there.
    inner.encode_special_tokens = True
    self._inner = inner
    vocab = inner.get_vocab(with_added_tokens=True)
    self.vocab_size = max(vocab.values(), default=-1) + 1
    eos = next((name for name in EOS_NAMES if name in vocab), None)
    if eos is None:
      raise UserError(
        f"tokenizer {name}: expected a token that ends a document, one of"
        f" {', '.join(EOS_NAMES)}. Set another with --config.data.tokenizer."
      )
    self.eos_id = vocab[eos]
    self.token_bytes = self._count_bytes(vocab)
    self.token_bytes[self.eos_id] = 0
    self.sha256 = hashlib.sha256(inner.to_str().encode()).hexdigest()

  def encode(self, text: str) -> list[int]:
    """Ids of a text, without any special token."""
    return self._inner.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: list[str]) -> list[list[int]]:
    """`encode` of several texts, on all cores."""
    encoded = self._inner.encode_batch_fast(texts, add_special_tokens=False)
    return [e.ids for e in encoded]

  def decode(self, ids: Iterable[int]) -> str:
    """The text of ids; special tokens are written out."""
    return self._inner.decode(list(map(int, ids)), skip_special_tokens=False)

  def save(self, path: pathlib.Path) -> None:
    """Writes a tokenizer.json, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(self._inner.to_str(pretty=True), encoding="utf-8")
    part.replace(path)

  def _count_bytes(self, vocab: dict[str, int]) -> np.ndarray:
    added = self._inner.get_added_tokens_decoder()
    byte_level = isinstance(self._inner.decoder, decoders.ByteLevel)
    lengths = np.zeros(self.vocab_size, np.float32)
    for token, i in vocab.items():
      if i in added:
        special = added[i].special
        lengths[i] = 0 if special else len(token.encode())
      elif byte_level:
        lengths[i] = len(token)  # one stand-in character for each byte
      elif len(token) == 6 and token.startswith("<0x"):
        lengths[i] = 1
      else:
        lengths[i] = len(token.replace("\u2581", " ").encode())
    return lengths


def load(path: str) -> Tokenizer:
  """Reads a tokenizer.json.

  Raises:
    UserError: missing or not a tokenizer.
  """
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise UserError(
      f"data.tokenizer {path!r} does not exist: expected a tokenizer.json. Set"
      " it with --config.data.tokenizer."
    )
  try:
    inner = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
  except Exception as error:  # the library raises Exception itself
    reason = str(error).splitlines()[0]
    raise UserError(
      f"data.tokenizer {path!r} is not a tokenizer.json ({reason}). Set it with"
      " --config.data.tokenizer."
    ) from None
  return Tokenizer(inner, repr(path))


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
  """Trains byte-level BPE; the same texts always give the same tokenizer.

  Args:
    texts: training documents, never held-out ones.
    vocab_size: entries, EOS among them. A small corpus may give fewer.

  Raises:
    UserError: too small for 256 bytes and EOS.
  """
  if vocab_size < MIN_VOCAB:
    raise UserError(
      f"got data.vocab_size {vocab_size}: expected at least {MIN_VOCAB}, one"
      " for each byte and one for the end of a document. Set it with"
      " --config.data.vocab_size."
    )
  inner = tokenizers.Tokenizer(models.BPE())
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[EOS],
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  inner.train_from_iterator(texts, trainer)
  return Tokenizer(inner, "trained on the corpus")


def check_vocab(tokenizer: Tokenizer, vocab_size: int, name: str) -> None:
  """Raises a UserError if the model has fewer rows than the tokenizer ids."""
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"tokenizer {name} has {tokenizer.vocab_size} entries, but"
      f" data.vocab_size, the rows of the model's embedding, is {vocab_size}:"
      f" expected at least as many. Set --config.data.vocab_size="
      f"{tokenizer.vocab_size}, or another --config.data.tokenizer."
    )
