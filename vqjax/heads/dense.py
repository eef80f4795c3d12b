"""What does the ordinary softmax head look like under the contract, free or tied?"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from vqjax.embeddings.base import Embedding
from vqjax.heads.base import Head, bytes_of, row_init
from vqjax.ops import sampling, shards, softmax
from vqjax.types import Dtype, Size


class DenseHead(Head):
  """softmax(hidden · weightᵀ + bias): one row of D numbers for each token.

  Tied, it scores against the table of an embedding: give the same object to both,

    embedding = DenseEmbedding(vocab, dim)
    Transformer(embedding=embedding, head=DenseHead(vocab, dim, embedding=embedding))

  Attributes:
    use_bias: add a score for each token.
    embedding: the embedding whose table is the weight; None: the head has its own.
    weight_init: initialiser of the [V, D] weight.
    bias_init: initialiser of the [V] bias.
    dtype: dtype of the matrix product's operands; None: that of hidden and weight together.
    param_dtype: dtype of the parameters.
    softcap: largest absolute score c: scores are c · tanh(score / c); None: no cap.
    z_loss: coefficient of the mean squared log-normaliser in the training loss.
    label_smoothing: part of the target, in [0, 1), that is spread evenly over the vocabulary in
      the training loss; `log_prob` is of the token itself.
  """

  use_bias: bool = False
  embedding: Embedding | None = None
  weight_init: nn.initializers.Initializer = row_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32
  softcap: float | None = None
  z_loss: float = 0.0
  label_smoothing: float = 0.0

  def setup(self):
    self._check()
    if self.embedding is None:
      shape = self.vocab, self.dim
      self.weight = self.param("weight", self.weight_init, shape, self.param_dtype)
    if self.use_bias:
      self.bias = self.param("bias", self.bias_init, (self.vocab,), self.param_dtype)

  def _check(self):
    if self.vocab < 1:
      raise ValueError(f"vocab {self.vocab} holds no token; give at least 1")
    if not 0 <= self.label_smoothing < 1:
      raise ValueError(f"label_smoothing {self.label_smoothing} is outside [0, 1); 0.1 is usual")
    if self.z_loss < 0:
      raise ValueError(f"z_loss {self.z_loss} is negative; 1e-4 is usual, 0 for none")
    if self.softcap is not None and not self.softcap > 0:
      raise ValueError(f"softcap {self.softcap} is not positive; 30 is usual, None for no cap")
    tied = self.embedding
    if tied is not None and (tied.vocab, tied.dim) != (self.vocab, self.dim):
      raise ValueError(
        f"a head of vocab {self.vocab} and dim {self.dim} is tied to an embedding of vocab"
        f" {tied.vocab} and dim {tied.dim}; give both the same"
      )

  def _operands(self, hidden):
    self._check_hidden(hidden)
    weight = self.weight if self.embedding is None else self.embedding.table()
    return hidden, weight, self.bias if self.use_bias else None

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """hidden · weightᵀ + bias, capped, float32."""
    return softmax.linear_scores(*self._operands(hidden), self.dtype, self.softcap)

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats, in tiles; nan for a token outside [0, V)."""
    return self._softmax(hidden, tokens, mean=False).log_prob

  def _softmax(self, hidden, tokens, mean):
    hidden, weight, bias = self._operands(hidden)
    return softmax.linear_softmax(
      *(hidden, weight, tokens, bias),
      softcap=self.softcap,
      mean=mean,
      dtype=self.dtype,
      vocab_axis=self.vocab_axis,
    )

  def loss_terms(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """`log_prob` and `aux`, in one pass over the vocabulary."""
    if not (self.z_loss or self.label_smoothing):
      return super().loss_terms(hidden, tokens)
    found = self._softmax(hidden, tokens, mean=self.label_smoothing > 0)
    terms = {}
    if self.z_loss:
      terms["z_loss"] = self.z_loss * jnp.mean(found.log_z**2)
    if self.label_smoothing:
      # -(1 - s) log p - s · mean log p, less the loss that is counted already.
      apart = found.log_prob - found.mean_log_prob
      terms["label_smoothing"] = self.label_smoothing * apart.mean()
    return found.log_prob, terms

  def aux(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> dict[str, Float[Array, ""]]:
    """The means over the tokens of the z-loss and of what label smoothing adds, where asked for."""
    if not (self.z_loss or self.label_smoothing):
      return super().aux(hidden, tokens)
    return self.loss_terms(hidden, tokens)[1]

  def _rows(self) -> tuple[shards.Padded, ...]:
    weight = self.weight if self.embedding is None else self.embedding.table()
    bias = self.bias if self.use_bias else None
    return shards.Padded(weight, 0), shards.Padded(bias, -jnp.inf)

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    self._check_hidden(hidden)
    weight, bias = rows

    def scores(row_W):
      bias_W = None if bias is None else bias[row_W]
      return softmax.linear_scores(hidden, weight[row_W], bias_W, self.dtype, self.softcap)

    return sampling.row_blocks(
      hidden.shape[:-1], weight.shape[0], self.vocab, scores, self.vocab_axis
    )

  def size(self) -> Size:
    """V·D parameters and V for a bias; a tied head owns the bias alone."""
    params = (0 if self.embedding is not None else self.vocab * self.dim) + (
      self.vocab if self.use_bias else 0
    )
    return Size(params, bytes_of(params, self.param_dtype), 2 * self.vocab * self.dim)

  def logical_axes(self) -> dict:
    """The weight's and the bias's axes; a tied weight is the embedding's."""
    axes = {}
    if self.embedding is None:
      axes["weight"] = ("vocab", "table_embed")
    else:
      axes["embedding"] = self.embedding.logical_axes()["params"]
    if self.use_bias:
      axes["bias"] = ("vocab",)
    return {"params": axes}
