"""The contract of output heads, and what a head inherits.

A head implements `logits`, `log_prob` and `_blocks`, the logits of a block of the vocabulary at a
time. Exact sampling and top-k follow from the blocks, on one device or on many. A head with factors
overrides them with faster methods.
"""

from __future__ import annotations

import abc
import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax.layer import Layer
from vqjax.ops import sampling, vocab_parallel
from vqjax.ops.gradient_share import GradientShare, gradient_share
from vqjax.ops.scores import check_temperature
from vqjax.ops.vocab_parallel import Replicated, Sharded
from vqjax.ops.vocabulary import check_mask, in_vocabulary, widened


class Head(Layer):
  """A distribution over the vocabulary for each hidden vector.

  Log-probabilities are in nats and float32. A head is a Linen module without compact methods, so
  its methods can be called through `apply(..., method="log_prob")` or from a model's own methods.

  Where the mesh in context has an axis `vocab_axis`, each device of the axis holds and scans its
  own rows of the vocabulary, and the results are the same: `_rows` gives the arrays and `_blocks`
  scores the rows that one device holds.

  Attributes:
    vocab: number of tokens, V.
    dim: width of the hidden vectors, D.
    vocab_axis: mesh axis over which the vocabulary is sharded (`jax.set_mesh`). None, or without
      a mesh: every device holds the whole vocabulary.
  """

  vocab: int
  dim: int
  vocab_axis: str | None = dataclasses.field(default=None, kw_only=True)

  def __call__(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Return `logits(hidden)`."""
    return self.logits(hidden)

  @abc.abstractmethod
  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Scores whose softmax is the distribution.

    This is the only method that builds an array [*B, V].
    """

  @abc.abstractmethod
  def log_prob(
    self,
    hidden: Float[Array, "*B D"],
    tokens: Integer[Array, "*B"],
    temperature: float | int = 1.0,
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; nan for a token outside [0, V).

    The loss of a language model is -mean(log_prob). Neither it nor its gradient holds [*B, V].

    Args:
      hidden: one vector for each token.
      tokens: the tokens.
      temperature: divides the logits, as in `sample`: the log-probabilities are those with which
        `sample` draws at this temperature. A Python number. At another temperature than 1 a head
        with factors scores all tokens, a block at a time.

    Raises:
      ValueError: `temperature` is not positive.
    """

  def _log_prob_at(self, hidden, tokens, temperature):
    """`log_prob` at a temperature, from the logits a block at a time."""
    check_temperature(temperature)
    excess = self.over_blocks(lambda blocks: sampling.log_z_excess(blocks, temperature), hidden)
    return self.log_prob(hidden, tokens) / temperature - excess

  @abc.abstractmethod
  def _blocks(self, rows: dict[str, Any], hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The logits of `rows`: the arrays of `_rows`, of which a device may hold a part."""

  def _rows(self) -> dict[str, Sharded | Replicated]:
    """The arrays that `_blocks` scores with.

    By default they are those declared with a `pad_value`; a subclass adds what each device reads
    whole.
    """
    return self.sharded_arrays()

  def blocks(self, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The logits, one block of the vocabulary at a time."""
    return self._blocks({name: part.rows for name, part in self._rows().items()}, hidden)

  def over_blocks(self, body: Callable, hidden: Float[Array, "*B D"], *shared: Any) -> Any:
    """Call body(blocks of `hidden`, *shared).

    Each device of `vocab_axis` has its own blocks. The body must reduce over `blocks.axis`, so that
    it returns the same on all of these devices.
    """
    rows = self._rows()

    def run(arrays, shared):
      # Marking an array sums its gradient over the devices: before an operand of it is narrowed.
      *rows_here, hidden = vocab_parallel.varying(arrays)
      return body(self._blocks(dict(zip(rows, rows_here)), hidden), *shared)

    parts = *rows.values(), Replicated(hidden)
    return vocab_parallel.over_vocabulary(self.vocab_axis, run, parts, shared)

  def _over_vocabulary(self, body: Callable, *shared: Any) -> Any:
    """Call body(rows, *shared); each device has its part of the arrays of `_rows`."""
    rows = self._rows()
    call = lambda arrays, shared: body(dict(zip(rows, arrays)), *shared)
    return vocab_parallel.over_vocabulary(self.vocab_axis, call, tuple(rows.values()), shared)

  def aux(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> dict[str, Float[Array, ""]]:
    """Further terms of the training loss, by name."""
    del hidden, tokens
    return {}

  def loss_terms(
    self,
    hidden: Float[Array, "*B D"],
    tokens: Integer[Array, "*B"],
    mask: Bool[Array, "*B"] | None = None,
    ignore_index: int | None = None,
  ) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """`log_prob` and `aux`, which a head may compute at once.

    A token that is left out has log-probability 0 and contributes to no term and no gradient,
    whatever its hidden vector holds. Without `mask` and `ignore_index`, `log_prob` is nan for
    a token outside [0, V), and `aux` leaves it out.

    Args:
      hidden: one vector for each token.
      tokens: the targets.
      mask: False for the tokens to leave out.
      ignore_index: the target of further tokens to leave out, such as -1 or -100; unsigned tokens
        of 8 or 16 bits cannot hold a negative one.
    """
    if mask is None and ignore_index is None:
      return self._loss_terms(hidden, tokens)
    if mask is not None:
      check_mask(mask, tokens.shape)
    tokens = widened(tokens)
    counted = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask)
    if ignore_index is not None:
      counted &= tokens != ignore_index
    # Before the products: 0 · nan in the backward pass would reach the gradients of the variables.
    hidden = jnp.where(counted[..., None], hidden, 0)
    log_prob, terms = self._loss_terms(hidden, jnp.where(counted, tokens, -1))
    return jnp.where(counted, log_prob, 0.0), terms

  def _loss_terms(self, hidden, tokens):
    return self.log_prob(hidden, tokens), self.aux(hidden, tokens)

  def sample(
    self,
    hidden: Float[Array, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> Int[Array, "*B"]:
    """Draw a token from the exact distribution; -1 where no token is allowed.

    Args:
      hidden: one vector for each draw.
      key: source of randomness.
      temperature: divides the logits; 0 takes the arg max.
      top_k: keep only the k best tokens.
      top_p: keep only the smallest set of best tokens with this mass, after temperature and top_k.
      allowed: marks the tokens that may be drawn, [V] or [*B, V].

    Raises:
      ValueError: an option is outside its range, or `allowed` has another shape.
    """
    allowed = None if allowed is None else jnp.asarray(allowed)

    def body(rows, hidden, key, allowed):
      blocks = sampling.allow(self._blocks(rows, hidden), allowed, self.vocab)
      return sampling.sample(blocks, key, temperature, top_k, top_p)

    return self._over_vocabulary(body, hidden, key, allowed)

  def top_k(
    self, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Log-probabilities and tokens of the k most likely tokens, best first, exactly.

    Raises:
      ValueError: `k` is outside [1, V].
    """
    self._check_k(k)
    best = lambda rows, hidden: sampling.best(self._blocks(rows, hidden), k)
    scores, tokens, log_z = self._over_vocabulary(best, hidden)
    return scores - log_z[..., None], tokens

  def gradient_share(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> GradientShare:
    """The share of the gradient in the logits that the backward pass passes on to `hidden`.

    The loss is -log p(token). A diagnostic: exact, with about 4·V·D² operations for each hidden
    vector, which are taken one after another in blocks of the vocabulary. All but `rank` is nan for
    a token outside [0, V).

    Source: the question is that of Godey and Artzi, arXiv 2603.10145.

    Args:
      hidden: the contexts.
      tokens: their targets.
    """
    self._check_hidden(hidden)
    known, token = in_vocabulary(tokens, self.vocab)

    def body(rows, hidden, token):
      return gradient_share(lambda one: self._blocks(rows, one), hidden, token)

    found = self._over_vocabulary(body, hidden, token)
    outside = lambda x: jnp.where(known, x, jnp.nan)
    return GradientShare(*map(outside, found[:3]), found.rank)

  def _check_hidden(self, hidden: Array) -> None:
    if not jnp.issubdtype(hidden.dtype, jnp.floating):
      raise ValueError(
        f"`hidden` must be floating-point vectors of width {self.dim}; got {hidden.dtype} of shape"
        f" {hidden.shape}. Look token ids up in an embedding first."
      )
    if hidden.shape[-1] != self.dim:
      raise ValueError(
        f"`hidden` must have the width of the head; got {hidden.shape[-1]} for dim {self.dim}."
        " Give the head the width of the model."
      )

  def _check_k(self, k: int) -> None:
    if not isinstance(k, numbers.Integral) or not 1 <= k <= self.vocab:
      raise ValueError(
        f"`k` must be an integer in [1, vocab]; got {k} for vocab {self.vocab}. 50 is usual."
      )
