"""What every layer predicts at every position of a text: its page."""

from __future__ import annotations

import dataclasses
import functools
import html
import math
import os
import string
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vqjax.lm.generation.text_stream import token_text, visible
from vqjax.lm.lenses import Readings
from vqjax.lm.pages import SERIES, blank, document, element, html_table, plot
from vqjax.outputs import write_text

__all__ = []

MEASURES = {"entropy": "entropy", "kl": "KL from the last block", "rank": "rank of its best token"}
"""What may colour the cells of a page."""

MEANS = {
  "nats a token": "nats_per_token",
  "bits a byte": "bits_per_byte",
  "entropy, nats": "entropy",
  "KL, nats": "kl",
  "KL, bits a byte": "kl_bits_per_byte",
  "total variation": "total_variation",
}
"""Titles of the means over positions -> their names in a row."""


@dataclasses.dataclass(frozen=True)
class Reading:
  """The readings of one text.

  Attributes:
    found: the readings, arrays [S, T, ...].
    texts: the text of each token, [T].
    best: texts of the best tokens of each cell, [S][T][k].
    size: bytes of the text that is predicted.
    blocks: number of blocks before each reading, [S].
  """

  found: Readings
  texts: Sequence[str]
  best: Sequence[Sequence[Sequence[str]]]
  size: int
  blocks: Sequence[int]

  @staticmethod
  def of(found: Readings, blocks: Sequence[int], tokens: Sequence[int], tokenizer: Any) -> Reading:
    """The reading of a row of tokens from the readings [S, 1, T, ...] of `lens_readings`."""
    found = jax.tree.map(lambda x: np.asarray(x)[:, 0], found)
    text = functools.cache(lambda token: token_text(tokenizer, token))
    best = [[[text(int(t)) for t in cell] for cell in layer] for layer in found.tokens]
    size = len(tokenizer.decode(tokens).encode()) - len(tokenizer.decode(tokens[:1]).encode())
    return Reading(found, [text(token) for token in tokens], best, size, blocks)

  def rows(self) -> list[dict[str, Any]]:
    """Means of each layer over positions, and its cells, for JSON; None is not a finite number."""
    found = self.found
    # The last position has no target.
    per_byte = lambda nats: _finite(nats.sum() / math.log(2) / self.size) if self.size else None
    rows = []
    for layer, cells in enumerate(self.best):
      target = found.target_log_prob[layer, :-1].astype(float)
      cell = lambda at, layer=layer, cells=cells: {
        "token": self.texts[at],
        "best": [
          [text, _finite(np.exp(value))]
          for text, value in zip(cells[at], found.log_probs[layer, at])
        ],
        "nats": _finite(-found.target_log_prob[layer, at]),
        "entropy": _finite(found.entropy[layer, at]),
        "kl": _finite(found.kl[layer, at]),
        "total_variation": _finite(found.total_variation[layer, at]),
        "rank": int(found.rank[layer, at]),
      }
      rows.append(
        {
          "blocks": self.blocks[layer],
          "nats_per_token": _finite(-target.mean()) if len(target) else None,
          "bits_per_byte": per_byte(-target),
          "entropy": _finite(found.entropy[layer].mean()),
          "kl": _finite(found.kl[layer].mean()),
          "kl_bits_per_byte": per_byte(found.kl[layer, :-1].astype(float)),
          "total_variation": _finite(found.total_variation[layer].mean()),
          "cells": [cell(at) for at in range(len(self.texts))],
        }
      )
    return rows


def _finite(value) -> float | None:
  return float(value) if np.isfinite(value) else None


BODY = string.Template("""\
<p>Each row is what the final norm and the head make of the residual stream after so many blocks;\
 the top row is what the model predicts. A cell is the likeliest next token after the token of its\
 column; a pointer on it, or the focus of the keyboard, shows more in the corner of the window.</p>
<fieldset>
<legend>Colour by</legend>
$choices
</fieldset>
$cells
<h2>KL from the model's prediction</h2>
$plot
<h2>Means over positions</h2>
$sums
""")


def write_reading_page(
  reading: Reading,
  path: str | os.PathLike,
  title: str,
  divergences: Mapping[str, Sequence[float]] | None = None,
) -> None:
  """Write a page that loads nothing from outside, and replaces an older one atomically.

  Args:
    reading: the readings of the table.
    path: the file.
    title: title of the page.
    divergences: mean KL of every layer for each of some lenses, for the plot; None: that of
      `reading`.
  """
  rows = reading.rows()
  divergences = divergences or {"lens": reading.found.kl.mean(axis=-1)}
  # The largest entropy of the text has the full colour, and 10 nats of KL and rank 1000.
  entropies = [cell["entropy"] for row in rows for cell in row["cells"]]
  highest = max(1e-9, *(value or 0.0 for value in entropies))
  strengths = {
    "entropy": lambda cell: (cell["entropy"] or 0) / highest,
    "kl": lambda cell: 1 if cell["kl"] is None else math.log(1 + 9 * max(cell["kl"], 0), 91),
    "rank": lambda cell: math.log10(cell["rank"]) / 3,
  }
  blocks = lambda row: element("th", str(row["blocks"]), scope="row")
  lines = [[blocks(row), *(_cell(cell, strengths) for cell in row["cells"])] for row in rows[::-1]]
  choices = "".join(
    f'<label><input type="radio" name="by" id="{name}"{" checked" * (name == "entropy")}> {text}'
    "</label> "
    for name, text in MEASURES.items()
  )
  sums = [
    [blocks(row), *(element("td", _number(row[name])) for name in MEANS.values())] for row in rows
  ]
  body = BODY.substitute(
    choices=choices,
    cells=html_table(
      ["blocks", *map(visible, reading.texts)], lines, "cells", "Layers and positions"
    ),
    plot=plot(_plot(divergences, reading.blocks), "kl", "KL of every layer from the prediction"),
    sums=html_table(["blocks", *MEANS], sums, "", "Means over positions"),
  )
  write_text(path, document(title, body, width="90rem"))


def _cell(cell, strengths):
  style = "; ".join(f"--{name}: {0.85 * min(1, of(cell)):.3f}" for name, of in strengths.items())
  best = "\n".join(
    f"{_number(None if share is None else 100 * share, 1):>5} %  {_escaped(text)}"
    for text, share in cell["best"]
  )
  more = (
    f"{best}\nnext token of the text {_number(cell['nats'])} nats\n"
    f"entropy {_number(cell['entropy'])} nats\nKL {_number(cell['kl'], 4)} nats\n"
    f"total variation {_number(cell['total_variation'])}\n"
    f"rank of the last block's best {cell['rank']}"
  )
  shown = _escaped(cell["best"][0][0])
  return element("td", f"{shown}<span>{more}</span>", kind="cell", tabindex="0", style=style)


def _escaped(text: str) -> str:
  return html.escape(visible(text))


def _number(value: float | None, digits: int = 3) -> str:
  return "–" if value is None else f"{value:.{digits}f}"


def _plot(divergences, blocks):
  figure, axes = blank(height=3.2)
  for (name, values), color in zip(divergences.items(), SERIES):
    axes.plot(blocks, np.maximum(values, 1e-6), "o-", markersize=4, color=color, label=name)
  axes.set_yscale("symlog", linthresh=1e-2)
  axes.set_ylim(bottom=0)
  axes.set_xlabel("blocks")
  axes.set_ylabel("KL, nats a token")
  axes.legend(frameon=False, labelcolor="linecolor")
  return figure
