"""The VQ-Logits head, in which K codes stand for V tokens."""

# K scores and K masses stand for V tokens, since tokens on a code differ by their biases alone:
#
#   score_k = hidden · codebook_k                         [*B, K]   one product
#   mass_k  = log of the sum of exp(b_u) over u on k      [K]       once for all vectors
#   log Z   = logsumexp over k of (score_k + mass_k)      [*B]
#   log p(v) = score_c + b_v - log Z,  c the code of v
#
#   log_prob, loss_terms   `code_softmax`: a tiled softmax over codes with bias mass_k, then one
#                          code, bias and mass for each token
#   top_k                  `best_tokens`: scores gathered for tokens, chunk by chunk; log Z as above
#   sample                 a code by score_k + mass_k, then a token on it by its bias; with a filter
#                          or a mask from blocks of tokens, as everything else (`_scores`)
#
# On a mesh codes are split over devices, and so are tokens: a token's code may lie elsewhere.
# Decoding gathers the K scores on every device, which are few.

from __future__ import annotations

import math
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from vqjax import assign
from vqjax.assign.checks import check_codes
from vqjax.assign.text import TextStats
from vqjax.embeddings.codebook import CodebookEmbedding
from vqjax.heads.base import Arrays, RegularizedHead
from vqjax.ops import codes as code_ops
from vqjax.ops import device, sampling, softmax, topk, vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocabulary import in_vocabulary, mean_over
from vqjax.variables import Declaration, Initializer, Variable, integer_variable, row_init

__all__ = ["CodebookHead"]


class CodebookHead(RegularizedHead):
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
    codebook_init: initialiser of the [K, D] codebook; unused by a tied head.
    bias_init: initialiser of the [V] token bias, such as `UnigramBias`.
  """

  codes: int
  assignment_init: assign.Assignment = assign.zipf_mass
  token_bias: bool = False
  embedding: CodebookEmbedding | None = None
  commitment: float = 0.0
  codebook_init: Initializer = row_init
  bias_init: Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """The codebook [K, D] and assignment [V], or the embedding, and the bias [V]."""
    v, k = self.vocab, self.codes
    if self.embedding is not None:
      declared = {"embedding": self.embedding}
    else:
      shape, axes = (k, self.dim), ("codes", "table_embed")
      make = lambda: assign.checked_assignment(self.assignment_init(v, k), v, k)
      declared = {
        "codebook": Variable(shape, axes, self.codebook_init, self.param_dtype, pad_value=0),
        "assignment": integer_variable((v,), ("vocab",), make, pad_value=code_ops.NO_CODE),
      }
    if self.token_bias:
      # 0 and not -inf: padding rows have the code NO_CODE, which removes them.
      declared["token_bias"] = Variable(
        (v,), ("vocab",), self.bias_init, self.param_dtype, pad_value=0
      )
    return declared

  def check(self) -> None:
    check_codes(self.vocab, self.codes)
    super().check()
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

  def _factors(self, arrays: Arrays) -> tuple[Float[Array, "K D"], Int[Array, "V"]]:
    """The codebook and the code of each token, of the head itself or of its embedding."""
    own = arrays if self.embedding is None else arrays["embedding"]
    return own["codebook"], own["assignment"]

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Codes by exchange with their mean contexts, and each token's frequency."""
    found = super()._of_text(text)
    if self.embedding is not None:
      return found
    options = {"token_bias": self.token_bias, "init": self.assignment_init}
    code = text.codes(self.codes, **options)
    rows = text.means(code, self.codes, self.dim)
    return found | {"assignment_init": code, "codebook_init": rows}

  @final
  def linear(self) -> tuple[RowFactory, Float[Array, "V"] | None]:
    """The rows and the bias that the head scores with; a distillation reads them."""

    # `_row_of_code` is no lambda: a factory is compared by the identity of `compose`.
    def rows(arrays):
      codebook, assignment = self._factors(arrays)
      return RowFactory(assignment, codebook, _row_of_code), arrays.get("token_bias")

    return self._computed(lambda: vocab_parallel.over_vocabulary(None, rows, self.parts()), None)

  def _logits(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The score of each token's code, plus the token's bias, float32 (Eq. 3)."""
    codebook, assignment = self._factors(arrays)
    scores_BK = softmax.linear_scores(hidden, codebook, dtype=self.dtype)
    # A code that does not exist has no score: nan, not that of a neighbour.
    known, code = in_vocabulary(assignment, scores_BK.shape[-1])
    scores, bias = jnp.where(known, scores_BK[..., code], jnp.nan), arrays.get("token_bias")
    return scores if bias is None else scores + bias.astype(jnp.float32)

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    del counted  # K scores of a token are few
    return self._softmax(arrays, hidden, token, temperature=temperature).log_prob

  def _softmax(self, arrays, hidden, token, mean=False, temperature=1.0):
    return code_ops.code_softmax(
      hidden,
      *self._factors(arrays),
      token,
      arrays.get("token_bias"),
      temperature=temperature,
      mean=mean,
      dtype=self.dtype,
      vocab_axis=self.vocab_axis,
    )

  def _loss_terms(self, arrays, hidden, token, known, counted):
    del counted
    scores = self._softmax(arrays, hidden, token, mean=self.label_smoothing > 0)
    terms = self._commitment(arrays, hidden, token, known) if self.commitment else {}
    return scores.log_prob, terms | self._regularizers(scores, known)

  def _commitment(self, arrays, hidden, token, known):
    """The squared distance of hidden vectors to the codes of their tokens.

    commitment · mean over tokens and D of (hidden - stop_gradient(code of the token))². The mean
    over D, as in the authors' implementation of VQ-VAE, makes the coefficient independent of the
    width. Source: VQ-Logits, Section 3.4, which gives no formula; van den Oord et al. (2017), Eq.
    3, with the hidden vector as encoder output and the token's code as its code.
    """
    codebook, assignment = self._factors(arrays)
    code = code_ops.code_vectors(
      jax.lax.stop_gradient(codebook), assignment, token, jnp.float32, self.vocab_axis
    )
    distance = ((hidden.astype(jnp.float32) - code) ** 2).mean(axis=-1)
    return {"commitment": self.commitment * mean_over(distance, known)}

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """Blocks of consecutive tokens, from scores of all codes that are computed once."""
    (codebook, assignment), bias = self._factors(arrays), arrays.get("token_bias")
    batch = hidden.shape[:-1]
    score_KB = jnp.moveaxis(self._all_code_scores(codebook, hidden), -1, 0)
    return sampling.row_blocks(
      batch,
      assignment.shape[0],
      self.vocab,
      lambda cut: code_ops.token_scores(score_KB, cut(assignment), cut(bias)),
      self.vocab_axis,
      # Gathered scores are cheap to write and dear to read again: a block of them stays in a cache.
      width=max(1, sampling.CACHED_SCORES // max(1, math.prod(batch))),
    )

  def _all_code_scores(self, codebook, hidden):
    return code_ops.all_code_scores(hidden, codebook, self.codes, self.dtype, self.vocab_axis)

  def _top_k(self, arrays, hidden, k):
    """The k best tokens; the normaliser comes from K scores and K masses."""
    (codebook, assignment), bias = self._factors(arrays), arrays.get("token_bias")
    scores_BK = self._all_code_scores(codebook, hidden)
    # `best_tokens` keeps the maximum of every chunk for every vector.
    chunks = self.vocab // topk.chunk_size(self.vocab, k)
    if math.prod(hidden.shape[:-1]) * chunks > device.current().stored:
      score_Bk, token_Bk, _ = sampling.best(self._scores(arrays, hidden), k, normalizer=False)
    else:
      score_KB = jnp.moveaxis(scores_BK, -1, 0)
      score_Bk, token_Bk = code_ops.best_tokens(
        score_KB, assignment, bias, self.vocab, k, self.vocab_axis
      )
    mass_K = code_ops.log_mass(assignment, self.codes, bias, self.vocab_axis)
    return score_Bk - jax.nn.logsumexp(scores_BK + mass_K, axis=-1, keepdims=True), token_Bk

  def _sample(self, arrays, hidden, key, options, allowed):
    """A token; without filters a code first, then a token on it."""
    if not options.is_plain or allowed is not None:
      return super()._sample(arrays, hidden, key, options, allowed)
    codebook, assignment = self._factors(arrays)
    # Divided before the masses: at a temperature a code has the sum of exp(b_u / T).
    bias = arrays["token_bias"] / options.temperature if self.token_bias else None
    code_key, token_key = jax.random.split(key)
    mass_K = code_ops.log_mass(assignment, self.codes, bias, self.vocab_axis)
    scores_BK = self._all_code_scores(codebook, hidden) / options.temperature + mass_K
    # Noise of more than the default's 2^23 values, as in `sampling.gumbel`.
    code = jax.random.categorical(code_key, scores_BK, mode="high").astype(jnp.int32)
    return code_ops.draw_within(token_key, code, assignment, self.codes, bias, self.vocab_axis)


def _row_of_code(code_W, codebook_KD):
  return codebook_KD[code_W]
