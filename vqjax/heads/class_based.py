"""The class-based head: a class first, then a token of that class."""

# With C classes, the way to a log-probability and to all of them:
#
#   log_prob   class   `linear_log_prob` over C rows, with a bias of -inf for classes without tokens
#              token   `log_prob_in_class`: tokens, sorted by class, meet the rows of their class
#   _scores    pass 1  log of the sum of exp(score) over each class, [*B, C], from blocks of rows
#              pass 2  score - that of its class + log p(class), a block at a time
#
# Rows are split over devices by tokens, whatever their classes are: the sums of a class are
# all-reduced, and the class of a token is looked up where the token lies.

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vqjax import assign
from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays, Head
from vqjax.ops import class_softmax as class_ops
from vqjax.ops import codes as code_ops
from vqjax.ops import linear_decoding, sampling, softmax, vocab_parallel
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.variables import Declaration, Initializer, Variable, integer_variable, row_init

__all__ = ["ClassBasedHead"]


class ClassBasedHead(Head):
  """p(class of the token) · p(token | its class).

  Both are softmaxes of scores that are linear in hidden. The head has D·(C + V) parameters, but a
  token takes only about D·(C + V/C) multiply-adds: sqrt(V) classes of equal size are the cheapest.
  Source: Goodman (2001), Classes for Fast Maximum Entropy Training.

  The table token -> class is the variable `assignment` of the collection `codes`: it is saved and
  restored with the parameters, and never trained. A class without a token has probability 0.

  Attributes:
    classes: number of classes, C.
    assignment_init: int [V], the class of each token, or a function (vocab, classes).
    class_init: initialiser of the [C, D] weight of the classes.
    weight_init: initialiser of the [V, D] weight of the tokens.
  """

  classes: int
  assignment_init: assign.Assignment = assign.contiguous
  class_init: Initializer = row_init
  weight_init: Initializer = row_init

  def declare(self) -> Declaration:
    """The weights of classes [C, D] and tokens [V, D], and each token's class."""
    v, d, c, dtype = self.vocab, self.dim, self.classes, self.param_dtype
    make = lambda: assign.checked_assignment(self.assignment_init(v, c), v, c)
    axes = ("codes", "table_embed"), ("vocab", "table_embed")
    return {
      "class_weight": Variable((c, d), axes[0], self.class_init, dtype, pad_value=0),
      "weight": Variable((v, d), axes[1], self.weight_init, dtype, pad_value=0),
      "assignment": integer_variable((v,), ("vocab",), make, pad_value=code_ops.NO_CODE),
    }

  def check(self) -> None:
    if not 1 <= self.classes <= self.vocab:
      raise ValueError(
        f"`classes` must be in [1, vocab]; got {self.classes} for vocab {self.vocab}. The root of"
        " vocab is usual."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Classes by exchange, and contexts as the rows of tokens and classes."""
    code = text.codes(self.classes, init=self.assignment_init)
    return {
      "assignment_init": code,
      "class_init": text.means(code, self.classes, self.dim),
      "weight_init": text.contexts(self.dim),
    }

  def flops_per_token(self) -> int:
    """A product of width D for each class and each token of a class of mean size."""
    return 2 * self.dim * (self.classes + -(-self.vocab // self.classes))

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    """Log-probabilities; only the rows of each token's own class are scored."""
    # At another temperature the mass of a class is a sum over its tokens: all are scored.
    if temperature != 1:
      return super()._log_prob(arrays, hidden, token, temperature, counted)
    class_weight, assignment, axis = arrays["class_weight"], arrays["assignment"], self.vocab_axis
    # A token whose class is outside of [0, C) has no probability.
    exists, of_token = in_vocabulary(
      vocab_parallel.sharded_lookup(assignment, token, axis), self.classes
    )
    bias = vocab_parallel.own_part(self._class_bias(assignment), class_weight.shape[0], axis)
    log_prob_class = softmax.linear_log_prob(
      hidden, class_weight, of_token, bias, mask=counted, dtype=self.dtype, vocab_axis=axis
    )
    log_prob_token = class_ops.log_prob_in_class(
      hidden, arrays["weight"], assignment, token, of_token, self.classes, self.dtype, axis
    )
    return jnp.where(exists, log_prob_class + log_prob_token, jnp.nan)

  def _class_bias(self, assignment):
    """0 for a class that has tokens on any device; -inf for a class without tokens."""
    # On a mesh the classes are padded; padding classes have no tokens, so that they get -inf.
    rows = self.classes
    axis = vocab_parallel.inside(self.vocab_axis)
    if axis:
      rows += -rows % vocab_parallel.axis_size(axis)
    mass_C = code_ops.log_mass(assignment, rows, None, self.vocab_axis)
    return jnp.where(jnp.isneginf(mass_C), -jnp.inf, 0.0)

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The log-probabilities, after a pass for the normaliser of each class."""
    weight, assignment = arrays["weight"], arrays["assignment"]
    axis, batch, count = self.vocab_axis, hidden.shape[:-1], assignment.shape[0]
    # No bias is needed: `linear_blocks` scores rows beyond the vocabulary -inf by their numbers.
    raw = linear_decoding.linear_blocks(
      hidden, weight, None, self.vocab, ScoreOptions(dtype=self.dtype, vocab_axis=axis)
    )
    # Tokens are numbered over all devices, the assignment on this one.
    here = lambda tokens: jnp.maximum(tokens - vocab_parallel.first_row(axis, count), 0)

    def step(normalizers, index):
      score_WB, token_W = raw.block(index)
      score_BW = jnp.moveaxis(score_WB, 0, -1)
      return class_ops.add_scores(normalizers, score_BW, assignment[here(token_W)])

    normalizers = raw.fold(step, class_ops.empty_normalizers(batch, self.classes))
    log_z_BC = class_ops.log_normalizers(normalizers, axis)
    score_BC = code_ops.all_code_scores(
      hidden, arrays["class_weight"], self.classes, self.dtype, axis
    )
    log_class_BC = jax.nn.log_softmax(score_BC + self._class_bias(assignment)[: self.classes])
    offset_BC = log_class_BC - log_z_BC

    def log_prob(score_WB, token_W):
      score_BW = jnp.moveaxis(score_WB, 0, -1)
      # A class that does not exist has no probability: nan, not a neighbour's.
      known_W, class_W = in_vocabulary(assignment[here(token_W)], self.classes)
      found_BW = jnp.where(known_W, score_BW + offset_BC[..., class_W], jnp.nan)
      # Padding names some token, whose class says nothing.
      found_BW = jnp.where(jnp.isneginf(score_BW), -jnp.inf, found_BW)
      return jnp.moveaxis(found_BW, -1, 0)

    return raw.map(log_prob)
