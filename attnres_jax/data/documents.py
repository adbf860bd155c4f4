"""Documents: the unit of de-duplication and of the train / validation split."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from attnres_jax.errors import UserError


class Document(NamedTuple):
  """One text.

  Attributes:
    id: a name that decides the side of the split; it stays the same wherever
      the corpus lies on disk.
    text: valid Unicode, at least one character.
    held_out: True or False where the corpus comes split; None: by `id`.
  """

  id: str
  text: str
  held_out: bool | None = None


def content_id(text: str) -> str:
  """An id for a document that has no name: the hash of what it says."""
  return hashlib.sha256(text.encode()).hexdigest()


def is_held_out(doc_id: str, val_percent: float) -> bool:
  """Whether a document is validation data.

  Depends on nothing but the id, so a document stays on its side when others
  come or go, and a larger share holds out a superset.
  """
  return rank(doc_id) < val_percent * 100


def rank(doc_id: str) -> int:
  """Ten-thousandths, uniform over documents and the same everywhere."""
  return int(hashlib.sha256(doc_id.encode()).hexdigest(), 16) % 10_000


def split(
  documents: Iterable[Document], val_percent: float, name: str
) -> Iterator[tuple[Document, bool]]:
  """Drops repeated texts and says which documents are held out.

  A text that occurs twice is kept once, so it cannot be on both sides even if
  its two ids fall on different ones.

  Args:
    documents: the corpus.
    val_percent: the share to hold out, per cent of the documents.
    name: the corpus, for messages.

  Yields:
    (document, True if it is validation data), in the order of `documents`.

  Raises:
    UserError: at the end, if one of the sides stayed empty.
  """
  seen = set()
  sides = {True: 0, False: 0}
  lowest = 10_000
  for doc in documents:
    # 16 bytes a document: ten million of them take about 1 GB.
    digest = hashlib.sha256(doc.text.encode()).digest()[:16]
    if not doc.text or digest in seen:
      continue
    seen.add(digest)
    held_out = doc.held_out
    if held_out is None:
      held_out = is_held_out(doc.id, val_percent)
      lowest = min(lowest, rank(doc.id))
    sides[held_out] += 1
    yield doc, held_out
  check_sides(sides[False], sides[True], val_percent, name, lowest)


def check_sides(
  train: int,
  val: int,
  val_percent: float,
  name: str,
  lowest: int | None = None,
) -> None:
  """Checks that both sides of a split have documents.

  Args:
    train: training documents.
    val: documents held out.
    val_percent: the share that was asked for.
    name: the corpus, for the message.
    lowest: the lowest rank of all ids, if known: the message then says which
      share would hold something out.

  Raises:
    UserError: there are not two documents, or all are on one side.
  """
  total = train + val
  if total < 2:
    raise UserError(
      f"got {total or 'no'} usable document{'s' * (total != 1)} in {name}:"
      " expected at least 2 different ones, to hold one out for validation."
      " Set the corpus with --config.data.path."
    )
  if train and val:
    return
  got, more = ("all", "less") if val else ("none", "more")
  hint = ""
  if lowest is not None and not val:
    hint = f" ({lowest // 100 + 1} holds out at least one)"
  raise UserError(
    f"data.val_percent {val_percent} holds out {got} of the {total} documents"
    f" of {name}: expected {more}{hint}. Set it with"
    " --config.data.val_percent."
  )
