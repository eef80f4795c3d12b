"""Readings of the vocabulary tables of a model, and their page."""

from __future__ import annotations

import html
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats

from vqjax.lm.checkpoints import Loaded
from vqjax.lm.compression.judging import tables_of
from vqjax.lm.generation.text_stream import token_text, visible
from vqjax.lm.pages import SERIES, blank, document, element, html_table, plot
from vqjax.lm.texts import encode_text
from vqjax.outputs import write_text
from vqjax.tables import geometry

__all__ = []

RESERVED = re.compile(r"[<\[][|]?(unused|reserved|extra_id|pad\d)[^ ]*[>\]]", re.IGNORECASE)
"""Entries of tokens that no text has."""

CLASSES = (100, 1000, 10_000, 100_000)
"""Ranks by count at which groups of tokens end."""

SHARES = (0.5, 0.9, 0.99)
"""Shares of the variance of which the directions are counted."""


def table_readings(
  trained: Loaded,
  *,
  text: str | None = None,
  words: Sequence[str] = (),
  unused: Sequence[int] = (),
  k: int = 8,
) -> dict[str, Any]:
  """What the tables of a model look like, for JSON.

  Args:
    trained: a pretrained model.
    text: text in which tokens are counted; None: nothing is said of frequencies.
    words: words whose neighbours are wanted: those of the last token of each, which is named where
      a word has several.
    unused: tokens that no text has; empty: those with a name such as "<unused7>", or the rows of
      padding after the last token.
    k: number of neighbours, and of untrained tokens that are named.

  Raises:
    ValueError: a word has no token, or a token is outside the vocabulary.
  """
  model, variables, tokenizer = trained
  tied = model.head.embedding is not None
  counts = None
  if text is not None:
    tokens = encode_text(tokenizer, text)[1]
    if not tokens:
      raise ValueError("`--text` must have a token; got an empty text. Give another file.")
    counts = np.bincount(np.asarray(tokens, np.int64), minlength=model.head.vocab)
  padding = range(tokenizer.vocab, model.head.vocab)
  reserved = list(unused)
  if not reserved:
    pieces = (tokenizer.piece(token) for token in range(min(model.head.vocab, tokenizer.vocab)))
    reserved = [token for token, piece in enumerate(pieces) if RESERVED.fullmatch(piece)]
    # Rows of padding may hold anything, zeros as well: a centre of their own or none.
    reserved = reserved if len(reserved) >= 2 else list(padding)
  wanted = dict(_last_token(tokenizer, word) for word in words)
  found = {}
  for table_name, table in tables_of(model, variables).items():
    length, spread = geometry.norms(table), geometry.spectrum(table)
    one: dict[str, Any] = {
      "shape": list(table.shape),
      "norm": {"mean": length.mean()}
      | {f"p{part}": np.quantile(length, part / 100) for part in (1, 50, 99)},
      "mean_share": spread.mean_share,
      "participation": spread.participation,
      "entropy_dimension": spread.entropy_dimension,
      "directions": {f"{share:g}": spread.directions(share) for share in SHARES},
      "eigenvalues": spread.eigenvalues.tolist(),
    }
    if counts is not None:
      one["frequency"] = _by_frequency(length, counts)
    if wanted:
      tokens, cosines = geometry.nearest_rows(table, list(wanted.values()), k)
      one["nearest"] = {
        word: [[token_text(tokenizer, int(token)), float(cosine)] for token, cosine in zip(*row)]
        for word, row in zip(wanted, zip(tokens, cosines))
      }
    if unused or len(reserved) >= 2:
      is_output = tied or table_name == "head"
      distance, near = geometry.untrained(table, reserved, is_output=is_output)
      known = {*reserved, *padding}
      near = [int(token) for token in near if int(token) not in known]
      one["untrained"] = {
        "is_output": is_output,
        "reserved": len(reserved),
        "found": len(near),
        "nearest": [
          [token, token_text(tokenizer, token), float(distance[token])] for token in near[:k]
        ],
      }
    found[table_name] = one
  return _plain({"tied": tied, "padding": len(padding), "tables": found})


def _last_token(tokenizer, word):
  """A label for a word, and its last token, which the label names where there are several."""
  tokens = encode_text(tokenizer, word)[1]
  if not tokens:
    raise ValueError(
      f"`--nearest` must be a word that has a token; got {word!r}. Give another one."
    )
  last = tokens[-1]
  return (word if len(tokens) == 1 else f"{word}: {tokenizer.piece(last)}"), last


def _by_frequency(length, counts):
  """Rank correlation of norm and count among the tokens that occur, and means by classes."""
  seen = np.flatnonzero(counts)
  order = seen[np.argsort(-counts[seen], kind="stable")]
  classes, first = [], 0
  for last in (*(c for c in CLASSES if c < len(order)), len(order)):
    classes.append({"ranks": [first + 1, last], "norm": length[order[first:last]].mean()})
    first = last
  rest = np.flatnonzero(counts == 0)
  return {
    "seen": len(seen),
    "rank_correlation": scipy.stats.spearmanr(length[seen], counts[seen])[0],
    "classes": classes,
    "norm_of_unseen": length[rest].mean() if len(rest) else None,
  }


def _plain(value):
  """The value with Python's numbers in place of NumPy's, and None for what is not finite."""
  if isinstance(value, dict):
    return {name: _plain(part) for name, part in value.items()}
  if isinstance(value, list):
    return [_plain(part) for part in value]
  value = value.item() if isinstance(value, np.generic) else value
  return None if isinstance(value, float) and not math.isfinite(value) else value


def sections(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
  """The readings as tables: a title, the names of the columns, and rows of text."""
  made = []
  number = lambda value: "–" if value is None else f"{value:,.3g}"
  for name, one in found["tables"].items():
    title = f"{name}{', tied to the head' if found['tied'] else ''}"
    rows = [["rows", "{:,} × {:,}".format(*one["shape"])]]
    if found["padding"]:
      rows.append(["rows of padding, without a token", f"{found['padding']:,}"])
    norm = one["norm"]
    rows.append(["norm: mean; 1st, 50th, 99th percentile", "; ".join((
      number(norm["mean"]), ", ".join(number(norm[f"p{part}"]) for part in (1, 50, 99)),
    ))])  # fmt: skip
    rows.append(["share of the mean row in the mean square", f"{100 * one['mean_share']:.1f} %"])
    rows.append(["effective dimension: participation ratio", f"{one['participation']:.1f}"])
    rows.append(["effective dimension: exp of the entropy", f"{one['entropy_dimension']:.1f}"])
    for share, count in one["directions"].items():
      rows.append([f"directions with {100 * float(share):g} % of the variance", f"{count:,}"])
    made.append((title, ["", "value"], rows))
    if frequency := one.get("frequency"):
      rows = [["{:,} to {:,}".format(*c["ranks"]), number(c["norm"])] for c in frequency["classes"]]
      rows.append(["tokens that the text has not", number(frequency["norm_of_unseen"])])
      rows.append(["rank correlation of norm and count", number(frequency["rank_correlation"])])
      made.append((f"{name}: norm by frequency", ["rank by count", "mean norm"], rows))
    if nearest := one.get("nearest"):
      rows = [
        [word, ", ".join(f"{_shown(text)} {cosine:.2f}" for text, cosine in row)]
        for word, row in nearest.items()
      ]
      made.append((f"{name}: nearest rows", ["word", "tokens and cosines"], rows))
    if untrained := one.get("untrained"):
      rows = [
        [str(token), _shown(text), f"{distance:.3f}"]
        for token, text, distance in untrained["nearest"]
      ]
      alike = (
        "as near to those of the {:,} reserved tokens as these are to each other"
        if untrained["is_output"]
        else "as short as those of the {:,} reserved tokens"
      )
      title = (
        f"{name}: {untrained['found']:,} further rows {alike.format(untrained['reserved'])}; such"
        " tokens were hardly trained"
      )
      made.append((title, ["token", "text", "distance"], rows))
  return made


def _shown(text):
  return visible(text).replace(" ", "␣")


def write_table_page(found: dict[str, Any], path: str | os.PathLike, title: str) -> None:
  """Write a page that loads nothing from outside, and replaces an older one atomically."""
  parts = []
  for heading, columns, rows in sections(found):
    lines = ([element("td", html.escape(cell)) for cell in row] for row in rows)
    parts.append(element("h2", html.escape(heading)) + html_table(columns, lines, "text", heading))
  figure, axes = blank(height=3.2)
  for (name, one), color in zip(found["tables"].items(), SERIES):
    share = np.asarray(one["eigenvalues"]) / sum(one["eigenvalues"])
    axes.loglog(1 + np.arange(len(share)), np.maximum(share, 1e-9), color=color, label=name)
  axes.set_xlabel("direction")
  axes.set_ylabel("share of the variance")
  axes.legend(frameon=False, labelcolor="linecolor")
  parts.append(plot(figure, "spectrum", "Share of the variance of each direction"))
  write_text(path, document(title, "\n".join(parts), width="60rem"))
