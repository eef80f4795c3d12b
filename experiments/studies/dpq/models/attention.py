"""Transformer blocks that attend to a whole sequence, or to another sequence."""

import functools
from collections.abc import Callable

import jax
from flax import linen as nn

XAVIER = nn.initializers.xavier_uniform()


class AttentionBranch(nn.Module):
  """A residual branch of attention to the sequence itself, or to given keys and values."""

  heads: int
  dropout: float

  @nn.compact
  def __call__(self, x_BTD, key_value, deterministic, **options):
    dim = x_BTD.shape[-1]
    dense = functools.partial(nn.DenseGeneral, kernel_init=XAVIER)
    width = self.heads, dim // self.heads
    normed_BTD = nn.LayerNorm(name="norm")(x_BTD)
    query = dense(width, name="query")(normed_BTD)
    if key_value is None:
      key_value = [dense(width, name=name)(normed_BTD) for name in ("key", "value")]
    mixed = jax.nn.dot_product_attention(query, *key_value, **options)
    out_BTD = dense(dim, axis=(-2, -1), name="out")(mixed)
    return x_BTD + nn.Dropout(self.dropout, name="drop")(out_BTD, deterministic)


class FeedForward(nn.Module):
  """A residual branch of two dense layers with an activation between them."""

  hidden: int
  dropout: float
  activation: Callable

  @nn.compact
  def __call__(self, x_BTD, deterministic):
    dense = functools.partial(nn.Dense, kernel_init=XAVIER)
    drop = nn.Dropout(self.dropout, name="drop")
    inner = self.activation(dense(self.hidden, name="enter")(nn.LayerNorm(name="norm")(x_BTD)))
    out_BTD = dense(x_BTD.shape[-1], name="leave")(drop(inner, deterministic))
    return x_BTD + drop(out_BTD, deterministic)


class Block(nn.Module):
  """Self-attention, attention to another sequence if there is one, and a feed-forward layer.

  Called with vectors [B, T, D], the other sequence's keys and values or None, a mask of whichever
  sequence may have padding, and whether dropout is off. With another sequence a position sees no
  later one of its own.
  """

  heads: int
  hidden: int
  dropout: float
  activation: Callable = nn.relu

  @nn.compact
  def __call__(self, x_BTD, key_value, mask, deterministic):
    branch = functools.partial(AttentionBranch, self.heads, self.dropout)
    own = {"mask": mask} if key_value is None else {"is_causal": True}
    x_BTD = branch(name="self_attention")(x_BTD, None, deterministic, **own)
    if key_value is not None:
      x_BTD = branch(name="cross_attention")(x_BTD, key_value, deterministic, mask=mask)
    feed_forward = FeedForward(self.hidden, self.dropout, self.activation, name="feed_forward")
    return feed_forward(x_BTD, deterministic), None


def stacked(layers: int, *fields) -> Block:
  """So many blocks of these fields, with stacked parameters."""
  scanned = nn.scan(
    Block,
    variable_axes={"params": 0},
    split_rngs={"params": True, "dropout": True},
    in_axes=(0, nn.broadcast, nn.broadcast),
    length=layers,
  )
  return scanned(*fields)
