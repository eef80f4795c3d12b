"""What does the VQ-Logits head look like: K codes stand for V tokens?"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax import assign
from vqjax.assign.table import check_codes
from vqjax.embeddings.codebook import CodebookEmbedding
from vqjax.heads import regularizers
from vqjax.heads.base import Head, bytes_of, row_init
from vqjax.ops import codes as code_ops
from vqjax.ops import sampling, softmax, vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocabulary import in_vocabulary, mean_in_vocabulary
from vqjax.types import Dtype, Size


class CodebookHead(Head):
  """softmax over the vocabulary of hidden · codebook[code of the token] (+ a bias of the token).

  K·D parameters, O(N·K·D) exact log-probabilities. Without a token bias all tokens on a code are
  equally likely, so that no model's perplexity is below exp(E[log n]), n the number of tokens on
  the code; V more parameters for the bias lower that floor to exp(H(token | code)), since the bias
  is the same in every context (`assign.floor` computes both). Source: VQ-Logits, Eq. 2-5.

  The table token -> code is the variable `assignment` of the collection `codes`: saved and
  restored with the parameters, never trained.

  Tied, it has the codebook and the assignment of an embedding (Section 6): give the same object to
  both,

    embedding = CodebookEmbedding(vocab, dim, codes)
    Transformer(embedding=embedding, head=CodebookHead(vocab, dim, codes, embedding=embedding))

  Attributes:
    codes: number of codes, K.
    assignment_init: (vocab, codes) -> int [V], the code of each token; a tied head has that of its
      embedding.
    token_bias: give each token a score of its own inside its code.
    embedding: the embedding whose codebook and assignment these are; None: the head has its own.
    commitment: coefficient of the commitment term of the training loss (Section 3.4); 0 for none.
    z_loss: coefficient of the mean squared log-normaliser in the training loss.
    label_smoothing: part of the target, in [0, 1), that is spread evenly over the vocabulary in
      the training loss.
    codebook_init: initialiser of the [K, D] codebook; a tied head has that of its embedding.
    bias_init: initialiser of the [V] token bias, such as `UnigramBias`.
    dtype: dtype of the matrix product's operands; None: that of hidden and codebook together.
    param_dtype: dtype of the parameters.
  """

  codes: int
  assignment_init: assign.Assignment = assign.contiguous
  token_bias: bool = False
  embedding: CodebookEmbedding | None = None
  commitment: float = 0.0
  z_loss: float = 0.0
  label_smoothing: float = 0.0
  codebook_init: nn.initializers.Initializer = row_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    self._check()
    if self.embedding is None:
      shape = self.codes, self.dim
      self.codebook = self.param("codebook", self.codebook_init, shape, self.param_dtype)
      self.assignment = self.variable("codes", "assignment", self._initial_assignment)
      assign.check_shape(self.assignment.value.shape, self.vocab)
    if self.token_bias:
      self.bias = self.param("token_bias", self.bias_init, (self.vocab,), self.param_dtype)

  def _check(self):
    check_codes(self.vocab, self.codes)
    regularizers.check(self)
    if not 0 <= self.commitment < math.inf:
      raise ValueError(
        f"commitment {self.commitment} is negative or not finite; 0.25 is usual, 0 for none"
      )
    tied = self.embedding
    sizes = self.vocab, self.dim, self.codes
    if tied is not None and (tied.vocab, tied.dim, tied.codes) != sizes:
      raise ValueError(
        f"a head of vocab {self.vocab}, dim {self.dim} and codes {self.codes} is tied to an"
        f" embedding of vocab {tied.vocab}, dim {tied.dim} and codes {tied.codes}; give both the"
        " same"
      )

  def _initial_assignment(self):
    table = assign.checked(self.assignment_init(self.vocab, self.codes), self.vocab, self.codes)
    return jnp.asarray(table)

  @property
  def _bias(self):
    return self.bias if self.token_bias else None

  def factors(self) -> tuple[Float[Array, "K D"], Int[Array, "V"]]:
    """The codebook and the code of each token, of the head itself or of its embedding."""
    if self.embedding is not None:
      return self.embedding.factors()
    # Inside `nn.scan` the variable may be the NumPy array it was made from.
    return self.codebook, jnp.asarray(self.assignment.value)

  def linear(self) -> tuple[RowFactory, Float[Array, "V"] | None]:
    """The rows and the bias whose scores the head is a softmax of: what a distillation needs."""
    codebook, table = self.factors()
    return RowFactory(table, codebook, _row_of_code), self._bias

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The score of each token's code, plus the token's bias, float32 (Eq. 3)."""
    self._check_hidden(hidden)
    codebook, table = self.factors()
    scores_BK = softmax.linear_scores(hidden, codebook, dtype=self.dtype)
    return _token_scores(scores_BK, self._bias, table, slice(None))

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats, from K scores; nan for a token outside [0, V)."""
    return self._softmax(hidden, tokens).log_prob

  def _softmax(self, hidden, tokens, mean=False):
    self._check_hidden(hidden)
    return code_ops.code_softmax(
      *(hidden, *self.factors(), tokens, self._bias),
      mean=mean,
      dtype=self.dtype,
      vocab_axis=self.vocab_axis,
    )

  def loss_terms(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """`log_prob` and `aux`, from the same scores of the codes."""
    found = self._softmax(hidden, tokens, mean=self.label_smoothing > 0)
    terms = self._commitment(hidden, tokens) if self.commitment else {}
    return found.log_prob, terms | regularizers.terms(self, found, tokens)

  def aux(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> dict[str, Float[Array, ""]]:
    """The terms "commitment", "z_loss" and "label_smoothing", those that are asked for."""
    if not (self.commitment or self.z_loss or self.label_smoothing):
      return super().aux(hidden, tokens)
    return self.loss_terms(hidden, tokens)[1]

  def _commitment(self, hidden, tokens):
    """Hidden vectors are drawn to their tokens' codes.

    commitment · mean over tokens and D of (hidden - stop_gradient(code of the token))²: a mean over
    D too, as in the authors' implementation of VQ-VAE, so that the coefficient does not depend on
    the width. Source: VQ-Logits, Section 3.4, which gives no formula; van den Oord et al. (2017),
    Eq. 3, whose encoder output is the hidden vector here and whose code is the token's.
    """
    codebook, table = self.factors()
    _, token = in_vocabulary(tokens, self.vocab)
    code = code_ops.code_vectors(
      jax.lax.stop_gradient(codebook), table, token, jnp.float32, self.vocab_axis
    )
    apart = ((hidden.astype(jnp.float32) - code) ** 2).mean(axis=-1)
    return {"commitment": self.commitment * mean_in_vocabulary(apart, tokens, self.vocab)}

  def _rows(self) -> tuple[vocab_parallel.Sharded, ...]:
    codebook, table = self.factors()
    return (
      vocab_parallel.Sharded(codebook, 0),
      vocab_parallel.Sharded(table, code_ops.NO_CODE),
      vocab_parallel.Sharded(self._bias, 0),
    )

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """Blocks of consecutive tokens, from scores of all codes that are computed once."""
    codebook, table, bias = rows
    scores_BK = self._all_code_scores(codebook, hidden)
    return sampling.row_blocks(
      hidden.shape[:-1],
      table.shape[0],
      self.vocab,
      lambda row_W: _token_scores(scores_BK, bias, table, row_W),
      self.vocab_axis,
    )

  def _all_code_scores(self, codebook, hidden):
    self._check_hidden(hidden)
    return code_ops.all_code_scores(hidden, codebook, self.codes, self.dtype, self.vocab_axis)

  def sample(
    self,
    hidden: Float[Array, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> Int[Array, "*B"]:
    """As `Head.sample`; without filters a code is drawn first, then a token on it."""
    sampling.check_options(temperature, top_k, top_p)
    filtered = not (top_k is None and top_p is None and allowed is None)
    if temperature < 1e-6 or filtered:
      return super().sample(hidden, key, temperature, top_k, top_p, allowed)

    def body(rows, hidden, key):
      codebook, table, bias = rows
      bias = None if bias is None else bias / temperature
      code_key, token_key = jax.random.split(key)
      mass_K = code_ops.log_mass(table, self.codes, bias, self.vocab_axis)
      scores_BK = self._all_code_scores(codebook, hidden) / temperature + mass_K
      code = jax.random.categorical(code_key, scores_BK, mode="high").astype(jnp.int32)
      return code_ops.draw_within(token_key, code, table, self.codes, bias, self.vocab_axis)

    return self._over_vocabulary(body, hidden, key)

  def size(self) -> Size:
    """K·D parameters, V for a token bias, four bytes a token for the table of codes.

    A tied head owns the bias alone.
    """
    bias = self.vocab if self.token_bias else 0
    own = 0 if self.embedding is not None else self.codes * self.dim
    table = 0 if self.embedding is not None else bytes_of(self.vocab, jnp.int32)
    state = bytes_of(own + bias, self.param_dtype) + table
    return Size(own + bias, state, 2 * self.codes * self.dim)

  def logical_axes(self) -> dict:
    """Axes of the codebook, the token bias and the table of codes; or those of the embedding."""
    if self.embedding is None:
      axes = {
        "params": {"codebook": ("codes", "table_embed")},
        "codes": {"assignment": ("vocab",)},
      }
    else:
      axes = {name: {"embedding": tree} for name, tree in self.embedding.logical_axes().items()}
    if self.token_bias:
      axes["params"]["token_bias"] = ("vocab",)
    return axes


def _row_of_code(code_W, codebook_KD):
  return codebook_KD[code_W]


def _token_scores(scores_BK, bias, assignment, rows):
  # A code that does not exist has no score: nan, not that of a neighbour.
  known, code = in_vocabulary(assignment[rows], scores_BK.shape[-1])
  scores = jnp.where(known, scores_BK[..., code], jnp.nan)
  return scores if bias is None else scores + bias[rows].astype(jnp.float32)
