"""What does a head look like whose rows are composed of M codes each?"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from vqjax.assign.multiple import checked_codes, code_dtype, mixed_radix
from vqjax.heads.base import bytes_of, row_init
from vqjax.heads.linear import LinearHead
from vqjax.ops import product, sampling, vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.tiles import Scoring
from vqjax.ops.vocabulary import mean_in_vocabulary
from vqjax.types import Size


def sub_vector_init(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
  """Normal sub-vectors [M, K, D/M] with the variance of those of a row of width D: 1/D."""
  subspaces, _, width = shape
  return jax.random.normal(key, shape, dtype) * (subspaces * width) ** -0.5


class _ProductTables(LinearHead):
  """What heads share whose rows are composed of tables [M, K, D/M].

  Attributes:
    codes: number of sub-vectors of each table, K.
    subspaces: number of codes of a token, M; divides dim.
    token_bias: give each token a score of its own.
    table_init: initialiser of the [M, K, D/M] tables.
    bias_init: initialiser of the [V] token bias.
  """

  codes: int
  subspaces: int
  token_bias: bool = False
  table_init: nn.initializers.Initializer = sub_vector_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

  def setup(self):
    self._check_loss()
    if self.codes < 1:
      raise ValueError(f"codes {self.codes} name no sub-vector; give at least 1, 256 is usual")
    if self.subspaces < 1 or self.dim % self.subspaces:
      raise ValueError(
        f"subspaces {self.subspaces} do not divide dim {self.dim}; give one of"
        f" {[m for m in range(1, self.dim + 1) if self.dim % m == 0]}"
      )
    shape = self.subspaces, self.codes, self.dim // self.subspaces
    self.tables = self.param("tables", self.table_init, shape, self.param_dtype)
    if self.token_bias:
      self.bias = self.param("token_bias", self.bias_init, (self.vocab,), self.param_dtype)

  def _bias(self) -> Float[Array, "V"] | None:
    return self.bias if self.token_bias else None

  def _params(self) -> int:
    return self.codes * self.dim + (self.vocab if self.token_bias else 0)

  def _axes(self) -> dict:
    axes = {"tables": ("subspaces", "sub_codes", "sub_embed")}
    return axes | ({"token_bias": ("vocab",)} if self.token_bias else {})


class ProductHead(_ProductTables):
  """softmax(hidden · rowᵀ + bias), each row composed of M sub-vectors that its codes name.

  K·D parameters (and V for a bias) and V·M codes stand for V·D numbers. The loss is exact, in tiles
  of rows that are composed where they are used; decoding a few rows looks up M numbers a token and
  composes nothing. The codes are the variable `codes` of the collection `codes`: given by
  `codes_init` or by a conversion (`vqjax.convert`), never trained; `LearnedProductHead` learns
  them. Source: the future work of VQ-Logits; Jégou et al., Product quantization for nearest
  neighbor search, 2011.

  Attributes:
    codes_init: (vocab, codes, subspaces) -> int [V, M].
  """

  codes_init: Callable[[int, int, int], np.ndarray] = mixed_radix

  def setup(self):
    super().setup()
    self.code_table = self.variable("codes", "codes", self._initial_codes)
    if self.code_table.value.shape != (self.vocab, self.subspaces):
      raise ValueError(
        f"vocab {self.vocab} with {self.subspaces} subspaces has codes of shape"
        f" {self.code_table.value.shape}; give [{self.vocab}, {self.subspaces}]"
      )

  def _initial_codes(self):
    found = np.asarray(self.codes_init(self.vocab, self.codes, self.subspaces))
    return jnp.asarray(checked_codes(found, self.vocab, self.codes, self.subspaces))

  def _weight(self) -> RowFactory:
    return RowFactory(jnp.asarray(self.code_table.value), self.tables, product.compose)

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """Blocks of tokens whose scores are sums of M looked-up numbers, where hidden has few rows.

    Many rows share the cost of composing the block, and a product is faster than M look-ups each.
    """
    if 2 * math.prod(hidden.shape[:-1]) * self.subspaces > self.dim:
      return super()._blocks(rows, hidden)
    self._check_hidden(hidden)
    codes, bias, tables = rows
    dtype = self.dtype or jnp.promote_types(hidden.dtype, tables.dtype)
    partial_BMK = product.partial_scores(hidden, tables, dtype)
    scoring = Scoring(dtype, self.softcap)

    def scores(row_W):
      bias_W = None if bias is None else bias[row_W].astype(jnp.float32)
      return scoring.finish(product.summed_scores(partial_BMK, codes[row_W]), bias_W)

    return sampling.row_blocks(
      hidden.shape[:-1], codes.shape[0], self.vocab, scores, self.vocab_axis
    )

  def size(self) -> Size:
    """K·D parameters, V for a token bias, and one to four bytes for each of V·M codes."""
    state = bytes_of(self._params(), self.param_dtype)
    state += bytes_of(self.vocab * self.subspaces, code_dtype(self.codes))
    return Size(self._params(), state, 2 * self.vocab * self.dim)

  def logical_axes(self) -> dict:
    """Axes of the tables, of the token bias and of the codes."""
    return {"params": self._axes(), "codes": {"codes": ("vocab", "subspaces")}}


class LearnedProductHead(_ProductTables):
  """A `ProductHead` whose codes are learned, straight through: each row has a latent of D numbers.

  The row is composed of the sub-vectors nearest to the latent row. The tables get the gradient of
  what is composed of them; the latent row gets its row's gradient as if it were the row, and
  `commitment` draws it to the row. It is trained with V·D parameters more than it ships with:
  `vqjax.convert.frozen` gives the ProductHead's variables. Source: VQ-VAE (van den Oord et al.,
  2017), Eq. 3, on the rows of the weight; no term moves the tables apart from the loss itself.

  Attributes:
    latent_init: initialiser of the [V, D] latent rows.
    commitment: coefficient of the squared distance between latent rows and rows, the mean over the
      tokens of the batch.
  """

  latent_init: nn.initializers.Initializer = row_init
  commitment: float = 0.25

  def setup(self):
    super().setup()
    if not 0 <= self.commitment < math.inf:
      raise ValueError(
        f"commitment {self.commitment} is negative or not finite; 0.25 is usual, 0 for none"
      )
    shape = self.vocab, self.dim
    self.latent = self.param("latent", self.latent_init, shape, self.param_dtype)

  def _weight(self) -> RowFactory:
    return RowFactory(self.latent, self.tables, product.quantized)

  def aux(self, hidden, tokens) -> dict[str, Float[Array, ""]]:
    """As `LinearHead`, and the commitment."""
    return super().aux(hidden, tokens) | self._commitment(tokens)

  def loss_terms(self, hidden, tokens) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """`log_prob` and `aux`."""
    if not (self.z_loss or self.label_smoothing):
      return self.log_prob(hidden, tokens), self._commitment(tokens)
    log_prob, terms = super().loss_terms(hidden, tokens)
    return log_prob, terms | self._commitment(tokens)

  def _commitment(self, tokens):
    latent_ND = vocab_parallel.gather(self.latent, jnp.clip(tokens.reshape(-1), 0, self.vocab - 1))
    row_ND = lax.stop_gradient(product.nearest_rows(latent_ND, self.tables))
    apart_N = ((latent_ND - row_ND).astype(jnp.float32) ** 2).sum(axis=-1)
    mean = mean_in_vocabulary(apart_N, tokens.reshape(-1), self.vocab)
    return {"commitment": self.commitment * mean}

  def size(self) -> Size:
    """V·D latent parameters beside the K·D of the tables and V for a bias."""
    params = self._params() + self.vocab * self.dim
    flops = 2 * self.vocab * self.dim
    return Size(params, bytes_of(params, self.param_dtype), flops)

  def logical_axes(self) -> dict:
    """Axes of the latent rows, the tables and the token bias."""
    return {"params": self._axes() | {"latent": ("vocab", "table_embed")}}
