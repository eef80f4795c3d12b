"""What does a codebook head look like whose tokens also have a few numbers of their own?"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from vqjax import assign
from vqjax.assign.multiple import code_dtype
from vqjax.heads.base import bytes_of, row_init
from vqjax.heads.linear import LinearHead
from vqjax.ops import sampling, softmax
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.tiles import Scoring
from vqjax.types import Size


def compose(own: tuple[Array, Array], shared: tuple[Array, Array]) -> Float[Array, "W D"]:
  """codebook[code] + low · up, for rows with (code, low) and the shared (codebook, up)."""
  code_W, low_WR = own
  codebook_KD, up_RD = shared
  return codebook_KD[code_W] + low_WR @ up_RD


class ResidualCodebookHead(LinearHead):
  """softmax(hidden · rowᵀ + bias), each row the vector of its code plus a low-rank part of its own.

  K·D + R·(V + D) parameters (and V for a bias). At rank 0 it would be the codebook head, with its
  floor; a low-rank part tells the tokens of a code apart by context, which a bias cannot. It starts
  as the codebook head: the low-rank part is zero. The loss is exact, in tiles of rows that are
  composed where they are used.

  Attributes:
    codes: number of codes, K.
    rank: numbers of each token's own, R.
    assignment_init: (vocab, codes) -> int [V], the code of each token.
    token_bias: give each token a score of its own.
    codebook_init: initialiser of the [K, D] codebook.
    low_init: initialiser of the [V, R] numbers of the tokens.
    up_init: initialiser of the [R, D] vectors that they multiply.
    bias_init: initialiser of the [V] token bias.
  """

  codes: int
  rank: int
  assignment_init: assign.Assignment = assign.contiguous
  token_bias: bool = False
  codebook_init: nn.initializers.Initializer = row_init
  low_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  up_init: nn.initializers.Initializer = row_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

  def setup(self):
    self._check_loss()
    if not 1 <= self.codes <= self.vocab:
      raise ValueError(
        f"codes {self.codes} for a vocabulary of {self.vocab}; give 1 to {self.vocab} codes"
      )
    if not 1 <= self.rank <= self.dim:
      raise ValueError(
        f"rank {self.rank} in a head of dim {self.dim}; give 1 to {self.dim}, or a CodebookHead"
      )
    new = lambda name, init, *shape: self.param(name, init, shape, self.param_dtype)
    self.codebook = new("codebook", self.codebook_init, self.codes, self.dim)
    self.low = new("low", self.low_init, self.vocab, self.rank)
    self.up = new("up", self.up_init, self.rank, self.dim)
    if self.token_bias:
      self.bias = new("token_bias", self.bias_init, self.vocab)
    self.assignment = self.variable("codes", "assignment", self._initial_assignment)
    assign.check_shape(self.assignment.value.shape, self.vocab)

  def _initial_assignment(self):
    table = assign.checked(self.assignment_init(self.vocab, self.codes), self.vocab, self.codes)
    return jnp.asarray(table.astype(code_dtype(self.codes)))

  def _weight(self) -> RowFactory:
    own = jnp.asarray(self.assignment.value), self.low
    return RowFactory(own, (self.codebook, self.up), compose)

  def _bias(self) -> Float[Array, "V"] | None:
    return self.bias if self.token_bias else None

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """Blocks of tokens, from scores of all codes and of the R vectors, computed once."""
    self._check_hidden(hidden)
    (code_V, low_VR), bias, (codebook, up) = rows
    scores_BK = softmax.linear_scores(hidden, codebook, dtype=self.dtype)
    up_BR = softmax.linear_scores(hidden, up, dtype=self.dtype)
    scoring = Scoring(jnp.dtype(jnp.float32), self.softcap)

    def scores(row_W):
      own_BW = up_BR @ low_VR[row_W].astype(jnp.float32).T
      bias_W = None if bias is None else bias[row_W].astype(jnp.float32)
      return scoring.finish(scores_BK[..., code_V[row_W]] + own_BW, bias_W)

    return sampling.row_blocks(
      hidden.shape[:-1], low_VR.shape[0], self.vocab, scores, self.vocab_axis
    )

  def size(self) -> Size:
    """K·D + R·(V + D) parameters, V for a token bias, one to four bytes a token for its code."""
    params = self.codes * self.dim + self.rank * (self.vocab + self.dim)
    params += self.vocab if self.token_bias else 0
    state = bytes_of(params, self.param_dtype) + bytes_of(self.vocab, code_dtype(self.codes))
    return Size(params, state, 2 * self.vocab * self.dim)

  def logical_axes(self) -> dict:
    """Axes of the codebook, the low-rank part, the token bias and the table of codes."""
    params = {
      "codebook": ("shared_codes", "width"),
      "low": ("vocab", "rank"),
      "up": ("rank", "width"),
    }
    if self.token_bias:
      params["token_bias"] = ("vocab",)
    return {"params": params, "codes": {"assignment": ("vocab",)}}
