"""An index that chooses the keys to which a token attends, by blocks of positions."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from vqjax.lm.models.rotary import rotate
from vqjax.ops import narrow

__all__ = ["KeyIndex"]


@dataclasses.dataclass(frozen=True)
class KeyIndex:
  """Each token attends to the best blocks of earlier keys, and to all keys after the last block.

  A block's key is the mean of its tokens' keys of the index. Its score is the sum over the heads'
  positive products with it, as in the sparse attention of `qwen4_exp`.

  Attributes:
    heads: heads of the index's queries.
    dim: width of the index's queries and keys.
    budget: most tokens of the chosen blocks; a multiple of `ratio`.
    ratio: tokens of a block.
  """

  heads: int
  dim: int
  budget: int
  ratio: int

  def check(self) -> None:
    """Raise ValueError for sizes that contradict each other."""
    if min(self.heads, self.dim, self.budget, self.ratio) < 1 or self.budget % self.ratio:
      raise ValueError(
        f"`attention.index` must have positive sizes, and a budget of whole blocks; got {self}."
        " Change them."
      )

  def chooses(self, positions: int) -> bool:
    """Whether some key of so many may be left out."""
    return positions >= self.budget + self.ratio

  def axes(self, norm: dict) -> dict:
    """Logical axes of the parameters of an `IndexLayer`."""
    return {
      "query": {"kernel": ("embed", "heads", "head_dim")},
      "key": {"kernel": ("embed", "head_dim")},
      "query_norm": norm,
      "key_norm": norm,
    }


class Indexed(NamedTuple):
  """What the index has of tokens: its queries, and its keys before they are averaged."""

  query: Float[Array, "B T H C"]
  key: Float[Array, "B T C"]


class IndexLayer(nn.Module):
  """The projections and norms of an index.

  Attributes:
    of: the sizes.
    norm: the norm of queries and of blocks' keys.
    dtype: dtype of the computation.
  """

  of: KeyIndex
  norm: object
  dtype: object

  def setup(self):
    dense = lambda *width: nn.DenseGeneral(
      width,
      use_bias=False,
      dtype=self.dtype,
      kernel_init=nn.initializers.normal(0.02),
      dot_general=narrow.dot_general,
    )
    self.query, self.key = dense(self.of.heads, self.of.dim), dense(self.of.dim)
    self.query_norm, self.key_norm = (self.norm.module(self.dtype) for _ in range(2))

  def __call__(self, x_BTD: Float[Array, "B T D"], cos: Array, sin: Array) -> Indexed:
    """The queries, turned by the angles of their positions, and the keys."""
    key_BTC = self.key(x_BTD)
    if self.is_initializing():
      self.key_norm(key_BTC)  # of short texts no block's key is read
    return Indexed(rotate(self.query_norm(self.query(x_BTD)), cos, sin), key_BTC)

  def seen(
    self,
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S C"],
    starts: tuple[Array, Array],
    position: Int[Array, "*b T"],
  ) -> Bool[Array, "B T S"]:
    """Whether each token sees position s, if that is not after its own.

    Args:
      query: the index's queries.
      key: the index's keys of positions 0 to S - 1.
      starts: cosines and sines of the angles of the first position of each block.
      position: the positions of the queries.
    """
    ratio, batch = self.of.ratio, len(key)
    blocks = key.shape[1] // ratio
    pooled = key[:, : blocks * ratio].reshape(batch, blocks, ratio, -1).astype(jnp.float32)
    pooled = self.key_norm(pooled.mean(2).astype(self.dtype))
    cos, sin = (angle[..., :blocks, :] for angle in starts)
    pooled = rotate(pooled[:, :, None], cos, sin)[:, :, 0].astype(jnp.float32)
    score = jnp.einsum("bthc,bnc->bthn", query.astype(jnp.float32), pooled)
    score_BTN = jax.nn.relu(score).sum(2)
    complete_BT1 = (jnp.atleast_2d(position)[..., None] + 1) // ratio
    is_complete_BTN = jnp.arange(blocks) < complete_BT1
    score_BTN = jnp.where(is_complete_BTN, score_BTN, -1)
    _, best = jax.lax.top_k(score_BTN, min(self.of.budget // ratio, blocks))
    chosen = jnp.put_along_axis(jnp.zeros(score_BTN.shape, bool), best, True, -1, inplace=False)
    chosen = jnp.repeat(chosen & is_complete_BTN, ratio, axis=-1)
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, key.shape[1] - blocks * ratio)))
    return chosen | (jnp.arange(key.shape[1]) >= ratio * complete_BT1)
