"""A classifier of images whose head is a field."""

from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Integer

from vqjax.heads import Head
from vqjax.lm.models.base import Terms, named

Inputs = Integer[Array, "B ..."] | Float[Array, "B ..."]


class ConvNet(nn.Module):
  """Blocks of 3x3 convolution, batch norm, ReLU and pooling, then dense and head.

  With the defaults and images of 100 x 100 in three colours the body has 9,531,392 parameters, the
  number of the paper. Batch norm is over the whole (micro-)batch, also on a mesh. Source: LLM
  Vocabulary Compression for Low-Compute Environments, Appendix C.2.

  Attributes:
    head: hidden vectors of width `dim` -> a distribution over the classes.
    dim: width of the dense layer, D, which the head shares.
    channels: number of output channels of each convolution.
    images: inputs of a batch -> images [B, height, width, channels], inside the compiled step;
      None: the inputs are images.
  """

  head: Head
  dim: int = 512
  channels: tuple[int, ...] = (32, 64, 128)
  images: Callable | None = None

  context: ClassVar[int] = 1
  """Number of targets of an image."""

  @nn.compact
  def hidden(self, inputs: Inputs, deterministic: bool = True) -> Float[Array, "B D"]:
    """The hidden vector of each image."""
    x_BHWC = inputs if self.images is None else self.images(inputs)
    for at, width in enumerate(self.channels):
      x_BHWC = nn.Conv(width, (3, 3), name=f"convolutions_{at}")(x_BHWC)
      x_BHWC = nn.BatchNorm(deterministic, momentum=0.9, name=f"norms_{at}")(x_BHWC)
      # ReLU commutes with max pooling, and after it has a quarter of the work.
      x_BHWC = nn.relu(_max_pool(x_BHWC))
    return nn.relu(nn.Dense(self.dim, name="dense")(x_BHWC.reshape(len(x_BHWC), -1)))

  def log_prob(
    self, inputs: Inputs, targets: Integer[Array, "B"], deterministic: bool = True
  ) -> Float[Array, "B"]:
    """Log-probability, in nats, of each image's class."""
    return self.head.log_prob(self.hidden(inputs, deterministic), targets)

  def loss_terms(
    self, inputs: Inputs, targets: Integer[Array, "B"], deterministic: bool = True
  ) -> tuple[Float[Array, "B"], Terms]:
    """`log_prob`, and the head's terms of the loss as "head/NAME"."""
    log_prob, terms = self.head.loss_terms(self.hidden(inputs, deterministic), targets)
    return log_prob, named("head", terms)

  def hits(self, inputs: Inputs, targets: Integer[Array, "B"]) -> dict[str, Bool[Array, "B"]]:
    """Whether the most likely class, and its group, are those of the image."""
    hidden_BD = self.hidden(inputs)
    hits = {"accuracy": self.head.top_k(hidden_BD, 1)[1][:, 0] == targets}
    if hasattr(self.head, "group_of"):
      group_B = self.head.log_group(hidden_BD).argmax(axis=-1)
      hits["group_accuracy"] = group_B == self.head.group_of(targets)
    return hits


def _max_pool(x_BHWC):
  """The maximum of squares of 2 x 2, without a last odd row or column.

  It is computed by choices between two numbers, whose gradient goes to the chosen one. The gradient
  of `lax.reduce_window` takes longer than all convolutions on a CPU, and that of a maximum along
  axes compares the maximum with numbers that the compiler may recompute with other rounding: if
  none of them is equal, it is 0 / 0.
  """
  larger = lambda one, other: jnp.where(one >= other, one, other)
  batch, height, width, channels = x_BHWC.shape
  high, wide = height // 2, width // 2
  x = x_BHWC[:, : 2 * high, : 2 * wide].reshape(batch, high, 2, wide, 2, channels)
  x = larger(x[:, :, 0], x[:, :, 1])
  return larger(x[:, :, :, 0], x[:, :, :, 1])
