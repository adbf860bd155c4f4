"""Corpora, tokenizers and the input pipeline; `load` is the way in."""

from attnres_jax.data.dataset import Dataset, load
from attnres_jax.data.tokenizer import Tokenizer

__all__ = ["Dataset", "Tokenizer", "load"]
