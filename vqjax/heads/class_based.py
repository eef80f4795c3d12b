"""What does the class-based head look like: a class first, then a token of that class?"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from vqjax import assign
from vqjax.heads.base import Head, bytes_of, row_init
from vqjax.ops import class_softmax as class_ops
from vqjax.ops import codes as code_ops
from vqjax.ops import sampling, softmax, vocab_parallel
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype, Size


class ClassBasedHead(Head):
  """p(class of the token) · p(token | its class), both softmaxes of scores linear in hidden.

  D·(C + V) parameters, but about D·(C + V/C) products for each token: sqrt(V) classes of equal size
  are the cheapest. Source: Goodman (2001), Classes for Fast Maximum Entropy Training.

  The table token -> class is the variable `assignment` of the collection `codes`: saved and
  restored with the parameters, never trained. A class without a token has no probability.

  Attributes:
    classes: number of classes, C.
    assignment_init: (vocab, classes) -> int [V], the class of each token.
    class_init: initialiser of the [C, D] weight of the classes.
    weight_init: initialiser of the [V, D] weight of the tokens.
    dtype: dtype of the matrix products' operands; None: that of hidden and weights together.
    param_dtype: dtype of the parameters.
  """

  classes: int
  assignment_init: assign.Assignment = assign.contiguous
  class_init: nn.initializers.Initializer = row_init
  weight_init: nn.initializers.Initializer = row_init
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    if not 1 <= self.classes <= self.vocab:
      raise ValueError(
        f"classes {self.classes} for a vocabulary of {self.vocab}; give 1 to {self.vocab}"
      )
    new = lambda name, init, rows: self.param(name, init, (rows, self.dim), self.param_dtype)
    self.class_weight = new("class_weight", self.class_init, self.classes)
    self.weight = new("weight", self.weight_init, self.vocab)
    self.assignment = self.variable("codes", "assignment", self._initial_assignment)
    assign.check_shape(self.assignment.value.shape, self.vocab)

  def _initial_assignment(self):
    table = self.assignment_init(self.vocab, self.classes)
    return jnp.asarray(assign.checked(table, self.vocab, self.classes))

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Log-probabilities of all tokens, which are logits that need no normaliser."""
    self._check_hidden(hidden)
    class_weight, weight, table = (part.rows for part in self._rows())
    scores_BV = softmax.linear_scores(hidden, weight, dtype=self.dtype)
    start = class_ops.empty_normalizers(hidden.shape[:-1], self.classes)
    log_z_BC = class_ops.log_normalizers(class_ops.add_scores(start, scores_BV, table), None)
    return self._log_prob_of(
      scores_BV, table, self._log_class(class_weight, table, hidden) - log_z_BC
    )

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; only each token's own class is scored."""
    self._check_hidden(hidden)
    known, token = in_vocabulary(tokens, self.vocab)

    def body(rows, hidden, token):
      class_weight, weight, table = rows
      axis = self.vocab_axis
      exists, of_token = in_vocabulary(
        vocab_parallel.sharded_lookup(table, token, axis), self.classes
      )
      bias = vocab_parallel.own_part(self._class_bias(table), class_weight.shape[0], axis)
      log_prob_class = softmax.linear_log_prob(
        hidden, class_weight, of_token, bias, dtype=self.dtype, vocab_axis=axis
      )
      log_prob_token = class_ops.log_prob_in_class(
        hidden, weight, table, token, of_token, self.classes, self.dtype, axis
      )
      return exists, log_prob_class + log_prob_token

    exists, log_prob = self._over_vocabulary(body, hidden, token)
    return jnp.where(known & exists, log_prob, jnp.nan)

  def _class_bias(self, table):
    """0 for a class that has tokens, on whichever device; -inf for one that has none."""
    rows = self.classes
    axis = vocab_parallel.inside(self.vocab_axis)
    if axis:
      rows += -rows % vocab_parallel.axis_size(axis)
    mass_C = code_ops.log_mass(table, rows, None, self.vocab_axis)
    return jnp.where(jnp.isneginf(mass_C), -jnp.inf, 0.0)

  def _log_class(self, class_weight, table, hidden):
    """Log-probabilities [*B, C] of all classes."""
    scores_BC = code_ops.all_code_scores(
      hidden, class_weight, self.classes, self.dtype, self.vocab_axis
    )
    return jax.nn.log_softmax(scores_BC + self._class_bias(table)[: self.classes])

  def _log_prob_of(self, scores, class_of, offset_BC):
    # A class that does not exist has no probability: nan, not that of a neighbour.
    known, class_of = in_vocabulary(class_of, self.classes)
    return jnp.where(known, scores + offset_BC[..., class_of], jnp.nan)

  def _rows(self) -> tuple[vocab_parallel.Sharded, ...]:
    return (
      vocab_parallel.Sharded(self.class_weight, 0),
      vocab_parallel.Sharded(self.weight, 0),
      # Inside `nn.scan` the variable may be the NumPy array it was made from.
      vocab_parallel.Sharded(jnp.asarray(self.assignment.value), code_ops.NO_CODE),
    )

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The log-probabilities, after a pass over all scores for the normaliser of each class."""
    self._check_hidden(hidden)
    class_weight, weight, table = rows
    axis, batch = self.vocab_axis, hidden.shape[:-1]
    scores = lambda row_W: softmax.linear_scores(hidden, weight[row_W], dtype=self.dtype)
    blocks_of = lambda of_row: sampling.row_blocks(batch, table.shape[0], self.vocab, of_row, axis)
    raw = blocks_of(scores)

    def step(found, index):
      scores_BW, token_W = raw.block(index)
      here_W = jnp.maximum(token_W - vocab_parallel.first_row(axis, table.shape[0]), 0)
      return class_ops.add_scores(found, scores_BW, table[here_W])

    found = raw.fold(step, class_ops.empty_normalizers(batch, self.classes))
    log_z_BC = class_ops.log_normalizers(found, axis)
    offset_BC = self._log_class(class_weight, table, hidden) - log_z_BC
    return blocks_of(lambda row_W: self._log_prob_of(scores(row_W), table[row_W], offset_BC))

  def size(self) -> Size:
    """D·(C + V) parameters, four bytes a token for the table; operations for equal classes."""
    params = self.dim * (self.classes + self.vocab)
    state = bytes_of(params, self.param_dtype) + bytes_of(self.vocab, jnp.int32)
    scored = self.classes + -(-self.vocab // self.classes)
    return Size(params, state, 2 * self.dim * scored)

  def logical_axes(self) -> dict:
    """Axes of both weights and of the table of classes."""
    return {
      "params": {
        "class_weight": ("codes", "table_embed"),
        "weight": ("vocab", "table_embed"),
      },
      "codes": {"assignment": ("vocab",)},
    }
