"""What does a classifier of pictures look like whose head is a field?"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Integer

from vqjax.heads import Head
from vqjax.models.base import Terms, named


def as_given(inputs: Float[Array, "B height width channels"]) -> Any:
  """The inputs: pictures already."""
  return inputs


class ConvNet(nn.Module):
  """Blocks of convolution 3x3 - norm - ReLU - 2x2 maximum, a dense layer with ReLU, and a head.

  With its defaults and pictures of 100 x 100 in three colours the body has 9,531,392 parameters.
  Batch normalisation is that of the whole (micro-)batch, on a mesh too. Source: LLM Vocabulary
  Compression for Low-Compute Environments, Appendix C.2; its parameter counts tell the rest.

  Attributes:
    head: hidden vectors of width `dim` -> a distribution over the classes.
    dim: width of the dense layer, D.
    channels: of the convolutions, one after another.
    images: inputs of a batch -> pictures [B, height, width, channels], inside of the compiled step.
    momentum: of the running statistics.
    epsilon: is added to the variances.
  """

  head: Head
  dim: int = 512
  channels: tuple[int, ...] = (32, 64, 128)
  images: Callable = as_given
  momentum: float = 0.9
  epsilon: float = 1e-5

  context: ClassVar[int] = 1
  """A picture has one class."""

  def setup(self):
    if self.head.dim != self.dim:
      raise ValueError(f"head has dim {self.head.dim} in a model of dim {self.dim}; give it that")
    if not self.channels:
      raise ValueError("channels () leave no convolution; give at least one")
    self.convolutions = [nn.Conv(width, (3, 3)) for width in self.channels]
    self.norms = [nn.BatchNorm(momentum=self.momentum, epsilon=self.epsilon) for _ in self.channels]
    self.dense = nn.Dense(self.dim)

  def __call__(
    self, inputs: Integer[Array, "B ..."] | Float[Array, "B ..."], deterministic: bool = True
  ) -> Float[Array, "B V"]:
    """Logits of all classes: for inspection, not for training."""
    return self.head.logits(self.hidden(inputs, deterministic))

  def hidden(
    self, inputs: Integer[Array, "B ..."] | Float[Array, "B ..."], deterministic: bool = True
  ) -> Float[Array, "B D"]:
    """What the head sees of each picture."""
    x_BHWC = self.images(inputs)
    least = 2 ** len(self.channels)
    if min(x_BHWC.shape[1:3]) < least:
      raise ValueError(
        f"pictures {x_BHWC.shape[1:3]} have no pixel left after {len(self.channels)} maxima; give"
        f" {least} rows and columns, or fewer channels"
      )
    for convolution, norm in zip(self.convolutions, self.norms, strict=True):
      x_BHWC = norm(convolution(x_BHWC), use_running_average=deterministic)
      # ReLU and maximum may change places: it is then a quarter of the work.
      x_BHWC = nn.relu(_largest_of_four(x_BHWC))
    return nn.relu(self.dense(x_BHWC.reshape(len(x_BHWC), math.prod(x_BHWC.shape[1:]))))

  def log_prob(
    self,
    inputs: Integer[Array, "B ..."] | Float[Array, "B ..."],
    targets: Integer[Array, "B"],
    deterministic: bool = True,
  ) -> Float[Array, "B"]:
    """Log-probability, in nats, of each picture's class."""
    return self.head.log_prob(self.hidden(inputs, deterministic), targets)

  def loss_terms(
    self,
    inputs: Integer[Array, "B ..."] | Float[Array, "B ..."],
    targets: Integer[Array, "B"],
    deterministic: bool = True,
  ) -> tuple[Float[Array, "B"], Terms]:
    """`log_prob`, and the head's terms of the loss as "head/NAME"."""
    log_prob, terms = self.head.loss_terms(self.hidden(inputs, deterministic), targets)
    return log_prob, named("head", terms)

  def hits(
    self, inputs: Integer[Array, "B ..."] | Float[Array, "B ..."], targets: Integer[Array, "B"]
  ) -> dict[str, Bool[Array, "B"]]:
    """Whether the likeliest class is the picture's; of a head with groups, the likeliest group."""
    hidden_BD = self.hidden(inputs)
    found = {"accuracy": self.head.top_k(hidden_BD, 1)[1][:, 0] == targets}
    if hasattr(self.head, "group_of"):
      group_B = self.head.log_group(hidden_BD).argmax(axis=-1)
      found["group_accuracy"] = group_B == self.head.group_of(targets)
    return found

  def logical_axes(self) -> dict:
    """Names of the axes of every variable, a pytree like the variables with tuples as leaves."""
    axes = {"params": {"dense": {"kernel": ("pixels", "embed"), "bias": ("norm",)}}}
    axes["batch_stats"] = {}
    for at in range(len(self.channels)):
      kernel = ("row", "column", "channels", "filters")
      axes["params"][f"convolutions_{at}"] = {"kernel": kernel, "bias": ("norm",)}
      axes["params"][f"norms_{at}"] = {"scale": ("norm",), "bias": ("norm",)}
      axes["batch_stats"][f"norms_{at}"] = {"mean": ("norm",), "var": ("norm",)}
    for collection, tree in self.head.logical_axes().items():
      axes.setdefault(collection, {})["head"] = tree
    return axes


def _largest_of_four(x_BHWC):
  """The maximum of squares of 2 x 2, without a last odd row or column.

  By choices between two, whose gradient goes to the one that is chosen. That of a window's maximum
  takes longer than all convolutions on a CPU; that of a maximum along axes compares it with numbers
  that the compiler may compute once more, rounded otherwise: where none is equal, it is 0 / 0.
  """
  batch, height, width, channels = x_BHWC.shape
  high, wide = height // 2, width // 2
  x = x_BHWC[:, : 2 * high, : 2 * wide].reshape(batch, high, 2, wide, 2, channels)
  x = _larger(x[:, :, 0], x[:, :, 1])
  return _larger(x[:, :, :, 0], x[:, :, :, 1])


def _larger(one, other):
  return jnp.where(one >= other, one, other)
