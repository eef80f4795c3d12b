"""The dense head with a first pass over 8-bit rows, and proofs of its answers."""

# A call of `best`, or of `sample` where a first pass takes less time than all rows do:
#
#   bounds    [V, *B]   scores from 8-bit rows, plus what they may be wrong by
#   finished            the mask of allowed tokens, and for a draw 1 / temperature and Gumbel noise
#   score_of  [*B, n]   exact scores of the `budget` rows of the highest bounds, and lower bounds
#   answer              the k best of these, or of all rows where a bound leaves doubt
#
# Cap, mask, temperature and noise keep the order of scores: what they make of a bound is a bound of
# what they make of the score. So the best noisy score, which is a draw, is found like an arg max.
#
# On a mesh each device has bounds and noise of its own rows, and `certified.best` compares them.

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Float

from vqjax.heads.base import Head
from vqjax.heads.dense import DenseHead
from vqjax.ops import certified, device, sampling, vocab_parallel
from vqjax.ops.certified import Best, Int8Rows
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.topk import TopK
from vqjax.variables import Declaration, Variable

__all__ = ["CertifiedHead"]

COLLECTION = "codes"


class CertifiedHead(DenseHead):
  """A `DenseHead` that decodes from 8-bit rows, with a dense head's exact answers.

  The best rows of a first pass, a quarter of the bytes of float32, are scored again with the weight
  itself; a bound on the error of every 8-bit row proves that no other row could be among the best.
  Where too many rows are in doubt, all are scored. `best` and `sample` use it; the loss, `log_prob`
  and `top_k`, whose log-probabilities need every row, are those of the dense head.

  The 8-bit rows are variables of the collection `codes`. Those of fresh variables bound no
  score, so that every answer comes from all rows; `from_dense` computes them. They have to be
  computed again where the weight has changed: `is_certified` compares them with it. Decoding
  notices where the score of a candidate lies outside of its bounds, and takes all rows; a change
  that no candidate shows may still give a wrong answer.

  Attributes:
    budget: largest number of rows in doubt that are scored again; on a mesh, of each device.
  """

  budget: int = 256

  @staticmethod
  def from_dense(
    head: Head, variables: dict[str, Any], budget: int = 256
  ) -> tuple["CertifiedHead", dict[str, Any]]:
    """A head and variables that answer as a dense head's do.

    Args:
      head: the dense head, tied or not.
      variables: its variables, with those of a tied embedding.
      budget: see the attribute.

    Raises:
      ValueError: `head` is another head, or its weight is not finite.
    """
    if type(head) not in (DenseHead, CertifiedHead):
      raise ValueError(
        f"`head` must be a DenseHead of vqjax.heads; got a {type(head).__name__} of"
        f" {type(head).__module__}. An NNX layer has its Linen one as `layer` and its variables by"
        " `linen_variables()`; heads that are compressed score few numbers for each token already."
      )
    fields = {f.name: getattr(head, f.name) for f in dataclasses.fields(DenseHead) if f.init}
    made = CertifiedHead(**fields | {"name": None, "parent": None, "budget": budget})
    rows, is_finite_V = jax.jit(made._int8_rows)(variables)
    if not is_finite_V.all():
      raise ValueError(
        f"the weight must be finite; got nan or inf in row {int(np.argmin(is_finite_V))}. Remove a"
        " token with a bias of -inf instead."
      )
    codes = {**variables.get(COLLECTION, {}), **_named(rows)}
    return made, {**variables, COLLECTION: codes}

  @staticmethod
  def is_certified(head: "CertifiedHead", variables: dict[str, Any]) -> bool:
    """Whether the 8-bit rows are what the weight gives."""
    own = variables.get(COLLECTION, {})
    rows = _named(jax.jit(head._int8_rows)(variables)[0])
    return all(
      name in own and np.shape(own[name]) == value.shape and bool((own[name] == value).all())
      for name, value in rows.items()
    )

  def _int8_rows(self, variables):
    """The 8-bit rows, and whether each row of the weight is finite."""

    def of_rows(self):
      weight = self.linear()[0].all()
      # As the products read it.
      weight = weight if self.dtype is None else weight.astype(self.dtype)
      return certified.int8_rows(weight), jnp.isfinite(weight).all(axis=1)

    own = {name: variables[name] for name in variables if name != COLLECTION}
    init = jax.eval_shape(self.init, jax.random.key(0), jnp.zeros((1, self.dim)))
    # `linear` reads all parts; blanks stand for the 8-bit rows that are about to be made.
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), init[COLLECTION])
    return self.apply({**own, COLLECTION: blank}, method=of_rows)

  def declare(self) -> Declaration:
    """The variables of the dense head, and the 8-bit rows."""
    zeros = nn.initializers.zeros_init()
    kept = {"collection": COLLECTION, "random": False}
    of_row = kept | {"pad_value": 0}
    vocab = (self.vocab,), ("vocab",)
    return super().declare() | {
      "rows": Variable((self.vocab, self.dim), ("vocab", "codes_embed"), zeros, jnp.int8, **of_row),
      "row_scale": Variable(*vocab, zeros, **of_row),
      # Nothing is known of fresh rows: their bounds are infinite, and every row is in doubt.
      "row_error": Variable(*vocab, nn.initializers.constant(jnp.inf), **of_row),
      "row_length": Variable(*vocab, zeros, **of_row),
      "row_mean": Variable((self.dim,), ("codes_embed",), zeros, **kept),
    }

  def check(self) -> None:
    super().check()
    if self.budget < 1:
      raise ValueError(f"`budget` must be at least 1; got {self.budget}. 256 is usual.")

  @final
  def best(self, hidden: Float[ArrayLike, "*B D"], k: int = 1) -> Best:
    """The k best tokens and their scores, exactly, and how many rows were in doubt.

    Raises:
      ValueError: `k` is outside [1, V].
    """
    self._check_k(k)
    return self._on_devices(lambda arrays, hidden: self._best(arrays, hidden, k), hidden)

  def _sample(self, arrays, hidden, key, options, allowed):
    """A token from the exact distribution.

    A draw from all tokens adds Gumbel noise to each score and its bound, and takes the best. A
    nucleus without `top_k` needs the mass of every row and takes all of them, as do draws of so
    many rows that their noise would not fit (`device.Device.stored`). On a CPU more than
    `narrow.FEW` vectors take all rows too, in less time than the first pass.
    """
    vectors = max(1, math.prod(hidden.shape[:-1]))
    is_open = options.kept is None
    if is_open and (options.has_nucleus or self.vocab * vectors > device.current().stored):
      return super()._sample(arrays, hidden, key, options, allowed)
    # Of many vectors a CPU's arithmetic takes longer than the bytes of the weight.
    best = self._best if certified.pays(vectors) else self._best_of_all
    if is_open:
      # The number of the device: no two of them may use the same noise.
      noise_key = jax.random.fold_in(key, vocab_parallel.first_row(self.vocab_axis, 1))
      noise = _Noise(noise_key, options.temperature)
      return best(arrays, hidden, 1, allowed, noise).tokens[..., 0]
    found = best(arrays, hidden, min(options.kept, self.vocab), allowed)
    return sampling.draw_of_best(found.scores, found.tokens, key, options)

  def _best(self, arrays, hidden, k, allowed=None, noise=None) -> Best:
    """`certified.best` of the device's own rows."""
    weight, bias = self._rows(arrays).all(), arrays["bias"]
    count = weight.shape[0]
    dtype = self._operand_dtype(hidden, weight)
    scoring = ScoreOptions(output=self._output())
    finish = lambda product_WB, cut: scoring.finish_rows(product_WB, cut(bias))
    int8 = Int8Rows(*(arrays[name] for name in _INT8))
    upper = certified.bounds(hidden.astype(dtype), int8, self.vocab, finish, self.vocab_axis)
    first = vocab_parallel.first_row(upper.axis, count)
    finished, noise_VB = self._finished(upper, count, allowed, noise)

    def score_of(token_Bn):
      own_Bn = jnp.clip(token_Bn - first, 0, count - 1)
      row_BnD = weight[own_Bn].astype(dtype)
      product_Bn = jnp.einsum(
        "...nd,...d->...n", row_BnD, hidden.astype(dtype), preferred_element_type=jnp.float32
      )
      lower_Bn = certified.lower(hidden.astype(dtype), int8, own_Bn)
      bias_Bn = None if bias is None else bias[own_Bn].astype(jnp.float32)
      score_Bn, lower_Bn = (scoring.finish(x, bias_Bn) for x in (product_Bn, lower_Bn))
      if noise_VB is None:
        return score_Bn, lower_Bn
      noise_Bn = jnp.take_along_axis(jnp.moveaxis(noise_VB, 0, -1), own_Bn, axis=-1)
      noisy = lambda score_Bn: score_Bn / noise.temperature + noise_Bn
      return noisy(score_Bn), noisy(lower_Bn)

    # One bound more than rows is compared with, so that at most count - 1 rows are scored again.
    budget = max(k, min(self.budget, count - 1))
    # The default of a GPU or TPU would round float32 operands, and the bound is of exact scores.
    with jax.default_matmul_precision("highest"):
      exact = lambda: finished(self._scores(arrays, hidden))
      return certified.best(finished(upper), exact, score_of, k, budget)

  def _best_of_all(self, arrays, hidden, k, allowed=None, noise=None) -> TopK:
    """The k best by the scores of all rows."""
    with jax.default_matmul_precision("highest"):
      blocks = self._scores(arrays, hidden)
      finished, _ = self._finished(blocks, len(arrays["rows"]), allowed, noise)
      scores, tokens, _ = sampling.best(finished(blocks), k, normalizer=False)
      return TopK(scores, tokens)

  def _finished(self, blocks, count, allowed, noise):
    """Mask and noise of a draw as a function of blocks, and the noise [V, *B] or None."""
    first = vocab_parallel.first_row(blocks.axis, count)
    # Stored, because bounds, exact scores and scores of all rows must get the same noise.
    noise_VB = None if noise is None else sampling.gumbel(noise.key, (count, *blocks.batch))

    def finished(blocks):
      blocks = sampling.allow(blocks, allowed, self.vocab)
      noisy = lambda scores, tokens: scores / noise.temperature + noise_VB[tokens - first]
      return blocks if noise is None else blocks.map(noisy)

    return finished, noise_VB


class _Noise(NamedTuple):
  """Of a draw from all tokens: the key of its Gumbel noise, and what divides scores."""

  key: Array
  temperature: float | int


# The variables that the fields of `Int8Rows` are kept in.
_INT8 = ("rows", "row_scale", "row_error", "row_length", "row_mean")


def _named(rows: Int8Rows) -> dict[str, Array]:
  return dict(zip(_INT8, rows))
