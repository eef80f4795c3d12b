"""The VQ-Logits head, in which K codes stand for V tokens."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax import assign
from vqjax.assign.table import check_codes
from vqjax.embeddings.codebook import CodebookEmbedding
from vqjax.heads import regularizers
from vqjax.heads.base import Head
from vqjax.ops import codes as code_ops
from vqjax.ops import sampling, softmax, topk
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocab_parallel import Sharded
from vqjax.ops.vocabulary import in_vocabulary, mean_in_vocabulary
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable, row_init, table


class CodebookHead(Head):
  """softmax of hidden · codebook[code of the token] + token bias.

  The head has K·D parameters and computes exact log-probabilities in O(N·K·D). Without a token bias
  all tokens on a code are equally likely, so that no model's perplexity is below exp(E[log n]),
  where n is the number of tokens on the code. V more parameters for the bias lower that floor to
  exp(H(token | code)), since the bias is the same in every context (`assign.floor` computes both).
  Source: VQ-Logits, Eq. 2-5.

  The table token -> code is the variable `assignment` of the collection `codes`: it is saved and
  restored with the parameters, and never trained.

  A tied head uses the codebook and the assignment of an embedding (Section 6). Give the same object
  to both:

    embedding = CodebookEmbedding(vocab, dim, codes)
    Transformer(embedding=embedding, head=CodebookHead(vocab, dim, codes, embedding=embedding))

  Example:
    >>> import jax
    >>> from vqjax import CodebookHead
    >>> head = CodebookHead(vocab=1000, dim=8, codes=50, token_bias=True)
    >>> hidden = jax.random.normal(jax.random.key(0), (4, 8))
    >>> variables = head.init(jax.random.key(1), hidden)
    >>> log_prob = head.apply(variables, hidden, jax.numpy.arange(4), method="log_prob")
    >>> print(log_prob.shape, head.size().params)
    (4,) 1400

  Attributes:
    codes: number of codes, K.
    assignment_init: int [V], the code of each token, or a function (vocab, codes) that makes it;
      unused by a tied head.
    token_bias: add a score for each token.
    embedding: the embedding whose codebook and assignment the head uses; None: its own.
    commitment: coefficient of the commitment term of the training loss (Section 3.4); 0 for none.
    z_loss: coefficient of the mean squared log-normaliser in the training loss.
    label_smoothing: part of the target, in [0, 1), that is spread evenly over the vocabulary in
      the training loss.
    codebook_init: initialiser of the [K, D] codebook; unused by a tied head.
    bias_init: initialiser of the [V] token bias, such as `UnigramBias`.
    dtype: dtype of the matrix product's operands; None: the promoted dtype of hidden and codebook.
    param_dtype: dtype of the parameters.
  """

  codes: int
  assignment_init: assign.Assignment = assign.contiguous
  token_bias: bool = False
  embedding: CodebookEmbedding | None = None
  commitment: float = 0.0
  z_loss: float = 0.0
  label_smoothing: float = 0.0
  codebook_init: Initializer = row_init
  bias_init: Initializer = nn.initializers.zeros_init()
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def declare(self) -> Declaration:
    """The codebook [K, D] and assignment [V], or the embedding, and the bias [V]."""
    v, k = self.vocab, self.codes
    if self.embedding is not None:
      declared = {"embedding": self.embedding}
    else:
      shape, axes = (k, self.dim), ("codes", "table_embed")
      make = lambda: assign.checked(self.assignment_init(v, k), v, k)
      declared = {
        "codebook": Variable(shape, axes, self.codebook_init, self.param_dtype, pad_value=0),
        "assignment": table((v,), ("vocab",), make, pad_value=code_ops.NO_CODE),
      }
    if self.token_bias:
      # 0 and not -inf: padding rows have the code NO_CODE, which removes them.
      declared["token_bias"] = Variable(
        (v,), ("vocab",), self.bias_init, self.param_dtype, pad_value=0
      )
    return declared

  def check(self) -> None:
    """Check the number of codes, the options of the loss and a tied embedding."""
    check_codes(self.vocab, self.codes)
    regularizers.check(self)
    tied = self.embedding
    if tied is not None and not isinstance(tied, CodebookEmbedding):
      raise ValueError(
        f"`embedding` must be a CodebookEmbedding; got a {type(tied).__name__}. Tie a DenseHead to"
        " a table with a row for each token."
      )
    sizes = self.vocab, self.dim, self.codes
    if tied is not None and (tied.vocab, tied.dim, tied.codes) != sizes:
      raise ValueError(
        f"`embedding` must have vocab {self.vocab}, dim {self.dim} and codes {self.codes}; got"
        f" vocab {tied.vocab}, dim {tied.dim} and codes {tied.codes}. Give both the same."
      )

  def flops_per_token(self) -> int:
    """One product of width D for each code."""
    return 2 * self.codes * self.dim

  def factors(self) -> tuple[Float[Array, "K D"], Int[Array, "V"]]:
    """The codebook and the code of each token, of the head itself or of its embedding."""
    if self.embedding is not None:
      return self.embedding.factors()
    return self.array("codebook"), self.array("assignment")

  def linear(self) -> tuple[RowFactory, Float[Array, "V"] | None]:
    """The rows and the bias that the head scores with; a distillation reads them."""
    codebook, assignment = self.factors()
    return RowFactory(assignment, codebook, _row_of_code), self.array("token_bias")

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The score of each token's code, plus the token's bias, float32 (Eq. 3)."""
    self._check_hidden(hidden)
    codebook, assignment = self.factors()
    scores_BK = softmax.linear_scores(hidden, codebook, dtype=self.dtype)
    # A code that does not exist has no score: nan, not that of a neighbour.
    known, code = in_vocabulary(assignment, scores_BK.shape[-1])
    scores, bias = jnp.where(known, scores_BK[..., code], jnp.nan), self.array("token_bias")
    return scores if bias is None else scores + bias.astype(jnp.float32)

  def log_prob(
    self,
    hidden: Float[Array, "*B D"],
    tokens: Integer[Array, "*B"],
    temperature: float | int = 1.0,
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats, from K scores; nan outside [0, V)."""
    return self._softmax(hidden, tokens, temperature=temperature).log_prob

  def _softmax(self, hidden, tokens, mean=False, temperature=1.0):
    self._check_hidden(hidden)
    codebook, assignment = self.factors()
    return code_ops.code_softmax(
      hidden,
      codebook,
      assignment,
      tokens,
      self.array("token_bias"),
      temperature=temperature,
      mean=mean,
      dtype=self.dtype,
      vocab_axis=self.vocab_axis,
    )

  def _loss_terms(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """`log_prob` and `aux`, from the same scores of the codes."""
    scores = self._softmax(hidden, tokens, mean=self.label_smoothing > 0)
    terms = self._commitment(hidden, tokens) if self.commitment else {}
    return scores.log_prob, terms | regularizers.terms(self, scores, tokens)

  def aux(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> dict[str, Float[Array, ""]]:
    """The terms "commitment", "z_loss" and "label_smoothing" that are not zero."""
    if not (self.commitment or self.z_loss or self.label_smoothing):
      return super().aux(hidden, tokens)
    return self._loss_terms(hidden, tokens)[1]

  def _commitment(self, hidden, tokens):
    """The squared distance of hidden vectors to the codes of their tokens.

    commitment · mean over tokens and D of (hidden - stop_gradient(code of the token))². The mean
    over D, as in the authors' implementation of VQ-VAE, makes the coefficient independent of the
    width. Source: VQ-Logits, Section 3.4, which gives no formula; van den Oord et al. (2017), Eq.
    3, with the hidden vector as encoder output and the token's code as its code.
    """
    codebook, assignment = self.factors()
    # Tokens outside of the vocabulary gather the code of token 0; the mean below leaves them out.
    _, token = in_vocabulary(tokens, self.vocab)
    code = code_ops.code_vectors(
      jax.lax.stop_gradient(codebook), assignment, token, jnp.float32, self.vocab_axis
    )
    distance = ((hidden.astype(jnp.float32) - code) ** 2).mean(axis=-1)
    return {"commitment": self.commitment * mean_in_vocabulary(distance, tokens, self.vocab)}

  def _rows(self) -> dict[str, Sharded]:
    tied = {} if self.embedding is None else self.embedding.sharded_arrays()
    return tied | super()._rows()

  def _blocks(self, rows: dict, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """Blocks of consecutive tokens, from scores of all codes that are computed once."""
    assignment, bias = rows["assignment"], rows.get("token_bias")
    batch = hidden.shape[:-1]
    score_KB = jnp.moveaxis(self._all_code_scores(rows["codebook"], hidden), -1, 0)
    return sampling.row_blocks(
      batch,
      assignment.shape[0],
      self.vocab,
      lambda cut: code_ops.token_scores(score_KB, cut(assignment), cut(bias)),
      self.vocab_axis,
      width=max(1, sampling.CACHED_SCORES // max(1, math.prod(batch))),
    )

  def _best_tokens(self, rows, hidden, scores_BK, k):
    """The k highest scores and their tokens."""
    chunks = self.vocab // topk.chunk_size(self.vocab, k)
    if math.prod(hidden.shape[:-1]) * chunks > sampling.STORED_SCORES:
      return sampling.best(self._blocks(rows, hidden), k, normalizer=False)[:2]
    score_KB = jnp.moveaxis(scores_BK, -1, 0)
    return code_ops.best_tokens(
      score_KB, rows["assignment"], rows.get("token_bias"), self.vocab, k, self.vocab_axis
    )

  def _all_code_scores(self, codebook, hidden):
    self._check_hidden(hidden)
    return code_ops.all_code_scores(hidden, codebook, self.codes, self.dtype, self.vocab_axis)

  def top_k(
    self, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Log-probabilities and tokens of the k most likely tokens, best first, exactly.

    The normaliser comes from the K scores of the codes and their masses.
    """
    self._check_k(k)

    def body(rows, hidden):
      scores_BK = self._all_code_scores(rows["codebook"], hidden)
      score_Bk, token_Bk = self._best_tokens(rows, hidden, scores_BK, k)
      mass_K = code_ops.log_mass(
        rows["assignment"], self.codes, rows.get("token_bias"), self.vocab_axis
      )
      return score_Bk - jax.nn.logsumexp(scores_BK + mass_K, axis=-1, keepdims=True), token_Bk

    return self._over_vocabulary(body, hidden)

  def sample(
    self,
    hidden: Float[Array, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> Int[Array, "*B"]:
    """Draw a token; without filters a code first, then a token on it.

    The arguments are those of `Head.sample`.
    """
    sampling.check_options(temperature, top_k, top_p)
    filtered = not (top_k is None and top_p is None and allowed is None)
    if temperature < 1e-6 or filtered:
      return super().sample(hidden, key, temperature, top_k, top_p, allowed)

    def body(rows, hidden, key):
      assignment = rows["assignment"]
      bias = rows["token_bias"] / temperature if self.token_bias else None
      code_key, token_key = jax.random.split(key)
      mass_K = code_ops.log_mass(assignment, self.codes, bias, self.vocab_axis)
      scores_BK = self._all_code_scores(rows["codebook"], hidden) / temperature + mass_K
      code = jax.random.categorical(code_key, scores_BK, mode="high").astype(jnp.int32)
      return code_ops.draw_within(token_key, code, assignment, self.codes, bias, self.vocab_axis)

    return self._over_vocabulary(body, hidden, key)


def _row_of_code(code_W, codebook_KD):
  return codebook_KD[code_W]
