"""Logit lens and tuned lens: what a decoder would predict after each of its blocks.

The logit lens (nostalgebraist, 2020) scores the residual stream after each block with the final
norm and the head. The tuned lens (Belrose et al., 2023) applies an affine translator of each block
first, x + A x + b, which is fitted so that the prediction is that of the last block.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from vqjax.lm.generation.decoding import check_decoder
from vqjax.lm.generation.kv_cache import Variables
from vqjax.lm.models import Transformer
from vqjax.ops.distillation import Readings, divergence_from_last, readings
from vqjax.tables.tensor_files import load_file, save_file

__all__ = [
  "Lens",
  "least_squares_lens",
  "lens_divergence",
  "lens_readings",
  "load_lens",
  "model_mark",
  "residual_streams",
  "save_lens",
]

ROWS = 64
"""Positions of which all layers are scored at a time."""


class Lens(NamedTuple):
  """Translators of the residual stream before each block; zeros are the logit lens.

  Attributes:
    weight: A of each; stream x becomes x + A x + b.
    bias: b of each.
  """

  weight: Float[Array, "L D D"]
  bias: Float[Array, "L D"]

  @staticmethod
  def identity(model: Transformer) -> Lens:
    """The lens that changes nothing."""
    shape = (model.layers, model.dim)
    return Lens(jnp.zeros((*shape, model.dim)), jnp.zeros(shape))


def residual_streams(
  model: Transformer, variables: Variables, tokens: Int[Array, "B T"]
) -> Float[Array, "S B T D"]:
  """The residual stream before the first block and after each: S = layers + 1.

  Raises:
    ValueError: the rows are longer than the context.
  """
  if tokens.shape[1] > model.context:
    raise ValueError(
      f"`tokens` must have at most context {model.context} columns; got {tokens.shape[1]}. Cut the"
      " text, or read it in windows."
    )
  model.check_keys_suffice()
  blocks = variables["params"]["blocks"]
  if isinstance(blocks, tuple):
    blocks = jax.tree.map(lambda *parts: jnp.stack(parts), *blocks)

  def forward(model):
    position_T = jnp.arange(tokens.shape[1])
    angles = model.angles(position_T)

    def step(x_BTD, entry):
      params, layer = entry
      x_BTD, _ = model.block().apply({"params": params}, x_BTD, layer, angles, True)
      return x_BTD, x_BTD

    x_BTD = model.embedded(model.embedding(tokens), position_T)
    _, after_LBTD = lax.scan(step, x_BTD, (blocks, model.layer_inputs()))
    return jnp.concatenate((x_BTD[None], after_LBTD))

  return nn.apply(forward, model)(variables)


def _translated(lens: Lens | None, streams: Float[ArrayLike, "S *B D"]) -> Float[Array, "S *B D"]:
  """The streams as the lens changes them, float32; the last one has no translator."""
  wide = jnp.asarray(streams, jnp.float32)
  if lens is None:
    return wide
  x_LND = wide[:-1].reshape(len(lens.weight), -1, wide.shape[-1])
  moved_LND = x_LND + jnp.einsum("lnd,led->lne", x_LND, lens.weight) + lens.bias[:, None]
  return jnp.concatenate((moved_LND.reshape(wide[:-1].shape), wide[-1:]))


def lens_divergence(
  model: Transformer, variables: Variables, lens: Lens | None, streams: Float[ArrayLike, "S *B D"]
) -> Float[Array, "L *B"]:
  """KL, in nats, of what each lens predicts from what the model predicts.

  It is differentiable in reverse mode in the lens; None is the logit lens. Neither it nor its
  gradient holds an array of the size of the vocabulary for all positions.
  """
  x_SBD = _translated(lens, streams).astype(model.dtype)
  score = lambda m, x: m.head.over_blocks(divergence_from_last, m.final(x))
  return model.apply(variables, x_SBD, method=score)


def lens_readings(
  model: Transformer,
  variables: Variables,
  tokens: Int[ArrayLike, "..."],
  lens: Lens | None = None,
  *,
  k: int = 5,
  blocks: Sequence[int] | None = None,
) -> Readings:
  """What is predicted before each block and after the last one, at every position.

  The arrays of the result have leading axes [S, B, T]. The last target of a row is unknown: its
  log-probability is nan.

  Args:
    model: the decoder, with any head.
    variables: its variables.
    tokens: rows of tokens, [B, T].
    lens: the tuned lens; None: the logit lens.
    k: number of best tokens.
    blocks: read after so many blocks only, in rising order, and after the last one, with which all
      are compared; 0 is before the first. None: after each.

  Raises:
    ValueError: a row is empty or longer than the context, a token is outside the vocabulary, `k`
      is outside [1, V], the model has not so many blocks, or the lens is of a model of another
      shape.
  """
  check_decoder(model)
  tokens = np.asarray(tokens)
  if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(
      f"`tokens` must be rows of at least one token, [B, T]; got {tokens.dtype} of shape"
      f" {tokens.shape}. Give [tokens] for a single row."
    )
  if tokens.min() < 0 or tokens.max() >= model.head.vocab:
    raise ValueError(
      f"`tokens` must be in [0, vocab {model.head.vocab}); got {tokens.min()} to {tokens.max()}."
      " Encode the text with the model's tokenizer."
    )
  if not 1 <= k <= model.head.vocab:
    raise ValueError(f"`k` must be in [1, vocab {model.head.vocab}]; got {k}. 5 is usual.")
  if lens is not None:
    _check_lens(lens, model)
  read = blocks_read(model, blocks)
  x_SBTD = _streams(variables, tokens, model=model)
  if blocks is not None:
    x_SBTD = x_SBTD[np.asarray(read)]
    if lens is not None:
      lens = Lens(*(part[np.asarray(read[:-1], int)] for part in lens))
  count = tokens.size
  size = min(ROWS, count)
  targets = np.concatenate((tokens[:, 1:], np.full_like(tokens[:, :1], -1)), axis=1).reshape(-1)
  x_SND = x_SBTD.reshape(len(x_SBTD), count, -1)
  parts = []
  for first in range(0, count, size):
    # The last part starts early enough to fit.
    first = min(first, count - size)
    part = slice(first, first + size)
    found = _readings(variables, lens, x_SND[:, part], targets[part], model=model, k=k)
    parts.append((first, jax.tree.map(np.asarray, found)))

  def joined(*arrays):
    whole = np.zeros((len(arrays[0]), count, *arrays[0].shape[2:]), arrays[0].dtype)
    for (first, _), array in zip(parts, arrays):
      whole[:, first : first + size] = array
    return whole.reshape(len(whole), *tokens.shape, *whole.shape[2:])

  found = jax.tree.map(joined, *(part for _, part in parts))
  found.target_log_prob[..., -1] = np.nan
  return found


def blocks_read(model: Transformer, blocks: Sequence[int] | None) -> list[int]:
  """The numbers of blocks after which `lens_readings` reads, rising: `blocks` and the last one."""
  if blocks is None:
    return list(range(model.layers + 1))
  if not all(0 <= number <= model.layers for number in blocks):
    raise ValueError(
      f"`blocks` must be in [0, {model.layers}], the blocks of the model; got {[*blocks]}. 0 reads"
      " before the first block."
    )
  return sorted({*blocks, model.layers})


def _check_lens(lens: Lens, model: Transformer) -> None:
  """Raise ValueError unless the lens has the shape of the model."""
  shape = (model.layers, model.dim)
  if lens.weight.shape != (*shape, model.dim) or lens.bias.shape != shape:
    raise ValueError(
      f"`lens` must have translators of {model.layers} blocks and width {model.dim}; got"
      f" {lens.weight.shape} and {lens.bias.shape}. Fit a lens on this model."
    )


def least_squares_lens(streams: Iterable[Float[np.ndarray, "S _ D"]], ridge: float = 1e-3) -> Lens:
  """The lens whose translated streams are nearest to the last one, in float64.

  It minimises sum |x + A x + b - y|² / |y|² + ridge · |A|² · sum |x|² / (D |y|²) over positions,
  where y is the last stream: errors count relative to its length, which the final norm removes.

  Args:
    streams: parts of the streams of some text, as `residual_streams` returns them, flattened.
    ridge: weight of |A|², relative to the mean square of a coordinate of x.
  """
  moments = cross = None
  for part in streams:
    x_SND = np.asarray(part, np.float64)
    y_ND = x_SND[-1]
    # Row vectors (x, 1) / |y|, so that b is part of the regression.
    length_N1 = np.maximum(np.linalg.norm(y_ND, axis=-1, keepdims=True), 1e-30)
    ones = np.ones((*x_SND[:-1].shape[:-1], 1))
    rows_LNe = np.concatenate((x_SND[:-1], ones), axis=-1) / length_N1
    error_LND = (y_ND - x_SND[:-1]) / length_N1
    added = rows_LNe.swapaxes(1, 2) @ rows_LNe, rows_LNe.swapaxes(1, 2) @ error_LND
    moments, cross = added if moments is None else (moments + added[0], cross + added[1])
  if moments is None:
    raise ValueError("`streams` must have at least one part; got none. Give a longer text.")
  dim = cross.shape[-1]
  for square_ee in moments:
    diagonal = np.einsum("ee->e", square_ee)
    diagonal[:dim] += ridge * diagonal[:dim].mean() + 1e-30
  solved_LeD = np.linalg.solve(moments, cross)
  weight = solved_LeD[:, :dim].swapaxes(1, 2)
  return Lens(jnp.asarray(weight, jnp.float32), jnp.asarray(solved_LeD[:, dim], jnp.float32))


def save_lens(lens: Lens, path: str | os.PathLike, variables: Variables) -> None:
  """Write a lens as safetensors, with a mark of the model that it is of."""
  tensors = {name: np.ascontiguousarray(value) for name, value in lens._asdict().items()}
  save_file(tensors | {"mark": model_mark(variables)}, path, {"format": "vqjax lens"})


def load_lens(path: str | os.PathLike, model: Transformer, variables: Variables) -> Lens:
  """Read the lens of a model.

  Raises:
    ValueError: the file is no lens, or that of another model.
  """
  try:
    tensors, _ = load_file(path)
    lens = Lens(*(jnp.asarray(tensors[name]) for name in Lens._fields))
    mark = tensors["mark"]
  except (ValueError, KeyError) as error:
    raise ValueError(
      f"`path` must be a file of `save_lens`; got {path}: {error}. Fit a lens again."
    ) from error
  _check_lens(lens, model)
  check_mark(mark, variables, path, kind="lens")
  return lens


def check_mark(
  mark: Float[np.ndarray, "n"], variables: Variables, path: str | os.PathLike, *, kind: str
) -> None:
  """Raise ValueError unless the mark in a file is that of a model."""
  own = model_mark(variables)
  # bfloat16 keeps three digits of each number.
  if mark.shape != own.shape or not np.allclose(mark, own, rtol=1e-2, atol=1e-6):
    raise ValueError(
      f"`path` must be a {kind} of this model; got {path}, which was fitted on another one. Fit a"
      f" {kind} on this model."
    )


def model_mark(variables: Variables) -> Float[np.ndarray, "n"]:
  """The root mean square of each parameter, by which a model is known again in any format."""
  params = {**variables["params"]}
  if isinstance(params["blocks"], tuple):
    params["blocks"] = jax.tree.map(lambda *parts: jnp.stack(parts), *params["blocks"])
  sizes = [jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean()) for x in jax.tree.leaves(params)]
  norm = jax.tree.leaves(params["final_norm"])[0]
  return np.concatenate((np.asarray(sizes), np.asarray(norm[:64], np.float32)))


@functools.partial(jax.jit, static_argnames="model")
def _streams(variables, tokens, *, model):
  return residual_streams(model, variables, tokens)


@functools.partial(jax.jit, static_argnames=("model", "k"))
def _readings(variables, lens, x_SND, targets_N, *, model, k):
  x_SND = _translated(lens, x_SND).astype(model.dtype)
  body = lambda blocks, targets: readings(blocks, targets, k)
  score = lambda m, x, targets: m.head.over_blocks(body, m.final(x), targets)
  return model.apply(variables, x_SND, targets_N, method=score)
