"""Concat-then-split packing with random access.

The documents of an epoch, shuffled, make one stream of tokens, which is cut
into windows of T inputs, and the windows are shuffled too: otherwise a batch
would be consecutive pages of one long document. Window k of an epoch can be
computed on its own, so a position in the data is one integer.
"""

import functools

import numpy as np

from attnres_jax.data.token_store import Tokens

Batch = dict[str, np.ndarray]


class Stream:
  """Documents on end, in a given order.

  Attributes:
    num_tokens: N, targets that cross from one document to the next included.
  """

  def __init__(self, tokens: Tokens, order: np.ndarray):
    """Args:
    tokens: the documents.
    order: int [documents], which comes when.
    """
    lengths = np.diff(tokens.offsets)[order]
    self._ids = tokens.ids
    self._sources = tokens.offsets[:-1][order]
    self._starts = np.concatenate([[0], np.cumsum(lengths)])
    self.num_tokens = int(self._starts[-1])

  def window(self, begin: int, seq_len: int) -> Batch:
    """Inputs [begin, begin + T) of the stream and the token after each.

    Returns:
      int32 [T] each:
        tokens, targets: ids.
        positions: from 0 in each piece of a document.
        segment_ids: from 1, one for each piece; 0 past the end of the stream.
        mask: 1 where the target belongs to the document of its input.
    """
    end = min(begin + seq_len + 1, self.num_tokens)
    ids, positions, segments = np.zeros((3, seq_len + 1), np.int32)
    first = int(np.searchsorted(self._starts, begin, side="right")) - 1
    d = first
    while d < len(self._sources) and self._starts[d] < end:
      low = max(begin, self._starts[d])
      high = min(end, self._starts[d + 1])
      piece = slice(low - begin, high - begin)
      source = self._sources[d] + low - self._starts[d]
      ids[piece] = self._ids[source : source + high - low]
      positions[piece] = np.arange(high - low)
      segments[piece] = d - first + 1
      d += 1
    same = (segments[1:] == segments[:-1]) & (segments[1:] > 0)
    return {
      "tokens": ids[:-1],
      "targets": ids[1:],
      "positions": positions[:-1],
      "segment_ids": segments[:-1],
      "mask": same.astype(np.int32),
    }


class TrainWindows:
  """An endless, shuffled sequence of windows; each epoch in a new order.

  Attributes:
    per_epoch: W, windows in an epoch. What is left of the stream after them,
      fewer than T tokens, is dropped; another piece in every epoch.
  """

  def __init__(self, tokens: Tokens, seq_len: int, seed: int):
    self._tokens, self._seq_len, self._seed = tokens, seq_len, seed
    self.per_epoch = max(int(tokens.offsets[-1]) - 1, 0) // seq_len
    # Two, because prefetching crosses into the next epoch early.
    self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

  def __getitem__(self, index: int) -> Batch:
    epoch, k = divmod(int(index), self.per_epoch)
    stream, windows = self._epoch(epoch)
    return stream.window(int(windows[k]) * self._seq_len, self._seq_len)

  def _make_epoch(self, epoch: int):
    # % because run.seed may be negative and SeedSequence takes no sign.
    entropy = np.random.SeedSequence([self._seed % (1 << 64), epoch])
    rng = np.random.default_rng(entropy)
    order = rng.permutation(self._tokens.num_documents)
    return Stream(self._tokens, order), rng.permutation(self.per_epoch)


def eval_windows(
  tokens: Tokens, order: np.ndarray, seq_len: int, count: int
) -> list[Batch]:
  """A fixed validation set, the same for every seed.

  Returns:
    `count` windows at equal distances in the whole stream, so that a small set
    still sees many documents; all windows if there are fewer. Only the last
    one of the stream can end in padding.
  """
  stream = Stream(tokens, order)
  available = -(-(stream.num_tokens - 1) // seq_len)
  count = min(count, available)
  picked = (i * available // count for i in range(count))
  return [stream.window(k * seq_len, seq_len) for k in picked]


def stack(windows: list[Batch], batch_size: int) -> Batch:
  """int32 [batch_size, T] arrays; missing rows are padding.

  Args:
    windows: at least one, at most `batch_size`.
  """
  rows = {key: np.stack([w[key] for w in windows]) for key in windows[0]}
  missing = batch_size - len(windows)
  return {k: np.pad(v, ((0, missing), (0, 0))) for k, v in rows.items()}
