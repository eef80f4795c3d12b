"""The codebook head with a low-rank residual for each token."""

# row = codebook[code] + low · up, so that a score has two parts:
#
#   hidden · row  =  (hidden · codebook)[code]  +  low · (up · hidden)
#                     [*B, K], once a call          [R] a token, with [*B, R] once a call
#
#   loss       composed rows, a tile at a time, and the gradient of each array from theirs
#   decoding   the sum of both parts, a block of tokens at a time                   (`_scores`)

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from vqjax import assign
from vqjax.assign.checks import check_codes
from vqjax.assign.multiple import code_dtype
from vqjax.assign.rows import low_rank
from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays
from vqjax.heads.linear import LinearHead
from vqjax.ops import sampling, softmax
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.scores import ScoreOptions
from vqjax.variables import Declaration, Initializer, Variable, integer_variable, row_init

__all__ = ["ResidualCodebookHead"]


def _compose_residual(own: tuple[Array, Array], shared: tuple[Array, Array]) -> Float[Array, "W D"]:
  """codebook[code] + low · up, from rows (code, low) and shared (codebook, up)."""
  code_W, low_WR = own
  codebook_KD, up_RD = shared
  return codebook_KD[code_W] + low_WR @ up_RD


class ResidualCodebookHead(LinearHead):
  """softmax(hidden · rowᵀ + bias), a row being its code plus a low-rank residual.

  The head has K·D + R·(V + D) parameters, and V for a bias. The residual distinguishes the tokens
  of a code by context, which a bias cannot; at rank 0 the head would be the codebook head, with its
  perplexity floor. The residual starts at zero. The loss is exact, in tiles of rows that are
  composed where they are used.

  Attributes:
    codes: number of codes, K.
    rank: numbers of each token's residual, R.
    assignment_init: int [V], the code of each token, or a function (vocab, codes) that makes it.
    token_bias: add a score for each token.
    codebook_init: initialiser of the [K, D] codebook.
    low_init: initialiser of the [V, R] coefficients of the tokens.
    up_init: initialiser of the [R, D] vectors that the coefficients multiply.
    bias_init: initialiser of the [V] token bias.
  """

  codes: int
  rank: int
  assignment_init: assign.Assignment = assign.zipf_mass
  token_bias: bool = False
  codebook_init: Initializer = row_init
  low_init: Initializer = nn.initializers.zeros_init()
  up_init: Initializer = row_init
  bias_init: Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """Codebook [K, D], residuals [V, R] · [R, D], bias [V] and assignment [V]."""
    v, d, k, r, dtype = self.vocab, self.dim, self.codes, self.rank, self.param_dtype
    declared = {
      "codebook": Variable((k, d), ("shared_codes", "width"), self.codebook_init, dtype),
      "low": Variable((v, r), ("vocab", "rank"), self.low_init, dtype, pad_value=0),
      "up": Variable((r, d), ("rank", "width"), self.up_init, dtype),
    }
    if self.token_bias:
      declared["token_bias"] = Variable((v,), ("vocab",), self.bias_init, dtype)
    make = lambda: assign.checked_assignment(self.assignment_init(v, k), v, k)
    return declared | {
      "assignment": integer_variable((v,), ("vocab",), make, code_dtype(k), pad_value=0)
    }

  def check(self) -> None:
    super().check()
    check_codes(self.vocab, self.codes)
    if not 1 <= self.rank <= self.dim:
      raise ValueError(
        f"`rank` must be in [1, dim]; got {self.rank} for dim {self.dim}. Take a CodebookHead for"
        " none."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Codes by exchange with their mean contexts, and the best low-rank remainder."""
    options = {"token_bias": self.token_bias, "init": self.assignment_init}
    code, rows = text.codes(self.codes, **options), text.contexts(self.dim)
    found = super()._of_text(text) | {"assignment_init": code}
    if rows is None:
      return found
    codebook = text.means(code, self.codes, self.dim)
    low, up = low_rank(rows - codebook[code], text.weights(), self.rank)
    return found | {"codebook_init": codebook, "low_init": low, "up_init": up}

  def _rows(self, arrays: Arrays) -> RowFactory:
    per_row = arrays["assignment"], arrays["low"]
    return RowFactory(per_row, (arrays["codebook"], arrays["up"]), _compose_residual)

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """Blocks of tokens, from scores of all codes and R vectors computed once."""
    code_V, low_VR, bias = arrays["assignment"], arrays["low"], arrays["bias"]
    codebook, up = arrays["codebook"], arrays["up"]
    # Once for all blocks: K + R products of width D, after which a token costs R multiplications.
    score_KB = softmax.rows_scores(codebook, hidden, dtype=self.dtype)
    up_BR = softmax.linear_scores(hidden, up, dtype=self.dtype)
    # The cap belongs to the sum of both parts, which exists only here.
    options = ScoreOptions(output=self._output())

    def scores(cut):
      code_W, low_WR, bias_W = cut((code_V, low_VR, bias))
      residual_WB = softmax.rows_scores(low_WR, up_BR, dtype=jnp.float32)
      return options.finish_rows(score_KB[code_W] + residual_WB, bias_W)

    return sampling.row_blocks(
      hidden.shape[:-1], low_VR.shape[0], self.vocab, scores, self.vocab_axis
    )
