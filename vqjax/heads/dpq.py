"""What does a head look like whose rows a quantiser makes, trained end to end?"""

from flax import linen as nn
from jaxtyping import Array, Float

from vqjax.embeddings.compact import CompactEmbedding
from vqjax.embeddings.dpq import DPQEmbedding
from vqjax.heads.base import bytes_of
from vqjax.heads.linear import LinearHead
from vqjax.ops.row_factory import RowFactory
from vqjax.quantizers import Quantizer
from vqjax.types import Size


class DPQHead(LinearHead):
  """softmax(hidden · rowᵀ + bias), whose rows are those of a `DPQEmbedding` of the head's own.

  The output side of DPQ. The rows of the whole vocabulary are quantised a tile at a time, as
  outside training; the targets of a batch are what the quantiser's terms and statistics are of.
  Where input and output are to have the same codes, `DenseHead(embedding=e)` scores with the
  input's. `compact` and `vqjax.convert.to_head` make it the `ProductHead` that ships.

  Attributes:
    quantizer: of width `dim` in its result: DPQ-SX or DPQ-VQ.
    use_bias: add a score for each token.
    query_init: initialiser of the [V, quantizer.dim] query table.
    bias_init: initialiser of the [V] bias.
  """

  quantizer: Quantizer
  use_bias: bool = False
  query_init: nn.initializers.Initializer = nn.initializers.normal(0.1)
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

  def setup(self):
    self._check_loss()
    self.table = self._table()
    if self.use_bias:
      self.bias = self.param("bias", self.bias_init, (self.vocab,), self.param_dtype)

  def _table(self) -> DPQEmbedding:
    return DPQEmbedding(
      *(self.vocab, self.dim, self.quantizer.clone(parent=None), self.query_init),
      param_dtype=self.param_dtype,
      vocab_axis=self.vocab_axis,
      parent=None,
    )

  def _weight(self) -> RowFactory:
    return self.table.rows()

  def _bias(self) -> Float[Array, "V"] | None:
    return self.bias if self.use_bias else None

  def aux(self, hidden, tokens) -> dict[str, Float[Array, ""]]:
    """As `LinearHead`, and the quantiser's terms of the targets."""
    return super().aux(hidden, tokens) | self._quantizer_terms(tokens)

  def loss_terms(self, hidden, tokens) -> tuple[Float[Array, "*B"], dict[str, Float[Array, ""]]]:
    """`log_prob` and `aux`."""
    log_prob, terms = super().loss_terms(hidden, tokens)
    return log_prob, terms | self._quantizer_terms(tokens)

  def _quantizer_terms(self, tokens):
    written = ("batch_stats", "centroids", "revival")
    train = any(self.is_mutable_collection(name) for name in written)
    return self.table.loss_terms(tokens, deterministic=not train)[1]

  def compact(self, variables: dict) -> CompactEmbedding:
    """Packed codes and values of the rows: `DPQEmbedding.compact`; the bias is not among them."""
    own = {name: trees["table"] for name, trees in variables.items() if "table" in trees}
    return self._table().compact(own)

  def size(self) -> Size:
    """The query table and the quantiser, as trained; each row is quantised and multiplied."""
    table = self._table().size()
    bias = self.vocab if self.use_bias else 0
    flops = self.vocab * (table.flops_per_token + 2 * self.dim)
    return Size(table.params + bias, table.state_bytes + bytes_of(bias, self.param_dtype), flops)

  def logical_axes(self) -> dict:
    """Axes of the rows' variables and of the bias."""
    axes = {name: {"table": tree} for name, tree in self._table().logical_axes().items()}
    if self.use_bias:
      axes["params"]["bias"] = ("vocab",)
    return axes
