"""With which variables does a run's embedding begin that is made of a trained table, or of its own?

Each start is an `Experiment.init_from`: called with the text, the model and its fresh variables.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, PRNGKeyArray

from vqjax.convert.reconstruct import reconstruct, to_clusters
from vqjax.embeddings import DPQEmbedding, Embedding, GuidedEmbedding, ProductEmbedding
from vqjax.lab.training.checkpoint import check_tokenizer, read_variables
from vqjax.lab.training.run import Text
from vqjax.quantizers import CentroidQuantizer, Quantizer

Variables = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FromTable:
  """An embedding made of the table of a run with a `DenseEmbedding`; all else begins anew.

  Attributes:
    folder: of that run.
    fill: (embedding, its fresh variables, table) -> its variables: `Guide()`, `Codes(...)`.
    best: take the checkpoint of lowest validation loss, not the newest.
  """

  folder: str
  fill: Callable[[Embedding, Variables, np.ndarray], Variables]
  best: bool = False

  def __call__(self, text: Text, model: nn.Module, variables: Variables) -> Variables:
    """The fresh variables with such an embedding.

    Raises:
      FileNotFoundError: the folder holds no checkpoint.
      ValueError: its tokenizer is another one, its embedding has no table of this shape, or one
        with numbers that are not finite.
    """
    check_tokenizer(self.folder, text)
    trained, step = read_variables(self.folder, self.best)
    table = trained["params"].get("embedding", {}).get("weight")
    where = f"checkpoint {step} of {self.folder}"
    own = model.embedding
    if table is None or table.shape != (own.vocab, own.dim):
      shape = "none" if table is None else list(table.shape)
      raise ValueError(f"{where} has a dense table {shape}; {[own.vocab, own.dim]} is wanted")
    if not np.isfinite(table).all():
      raise ValueError(f"{where}: its embedding is not finite; take another checkpoint")
    return with_embedding(variables, self.fill(own, embedding_of(variables), np.asarray(table)))


@dataclasses.dataclass(frozen=True)
class Guide:
  """A `GuidedEmbedding` is drawn to the table."""

  def __call__(self, embedding: Embedding, fresh: Variables, table: np.ndarray) -> Variables:
    """The fresh variables with the table as the guide; ValueError for any other embedding."""
    if not isinstance(embedding, GuidedEmbedding):
      raise ValueError(f"{type(embedding).__name__} has no guide; make it a GuidedEmbedding")
    return {**fresh, "guide": {"table": np.asarray(table, np.float32)}}


@dataclasses.dataclass(frozen=True)
class Codes:
  """A `ProductEmbedding` has the codes and values with which a quantiser rebuilds the table.

  With an `EncoderQuantizer` these are those of Shu and Nakayama, 2018.

  Attributes:
    quantizer: what learns; of the embedding's codes, subspaces, and `additive` and `shared` as it.
    steps: of Adam.
    seed: of its beginning and its noise.
  """

  quantizer: Quantizer
  steps: int
  seed: int = 0

  def __call__(self, embedding: Embedding, fresh: Variables, table: np.ndarray) -> Variables:
    """The embedding's variables; ValueError where it has another form than the quantiser."""
    form = lambda x: (x.codes, x.subspaces, x.shared, x.additive)
    if not isinstance(embedding, ProductEmbedding) or form(embedding) != form(self.quantizer):
      raise ValueError(
        f"{embedding} has no place for the codes of {self.quantizer}; give a ProductEmbedding with"
        " the same codes, subspaces, shared and additive"
      )
    # The network sees numbers of unit size, however small those of the table are.
    size = float(np.sqrt(np.mean(np.square(table, dtype=np.float64)))) or 1.0
    learned, variables = self.learned(table / np.float32(size))
    encode = jax.jit(lambda tokens: learned.apply(variables, tokens, method="codes_of"))
    codes = np.asarray(encode(jnp.arange(embedding.vocab)))
    values = size * np.asarray(learned.apply(variables, method="values"))
    kind = np.asarray(fresh["codes"]["codes"]).dtype
    return {"params": {"values": values}, "codes": {"codes": codes.astype(kind)}}

  def learned(self, table: np.ndarray) -> tuple[DPQEmbedding, Variables]:
    """The embedding that was trained to rebuild the table, and its variables."""
    vocab, dim = table.shape
    embedding = DPQEmbedding(vocab, dim, self.quantizer)
    start, draw = jax.random.split(jax.random.key(self.seed))
    variables = embedding.init(start, jnp.zeros((1,), jnp.int32))
    # The table itself is what is quantised; what quantises it is trained.
    variables["params"]["query"] = jnp.asarray(table)
    options = {"key": draw, "steps": self.steps, "trained": ("quantizer",)}
    return embedding, reconstruct(embedding, variables, table, **options)


@dataclasses.dataclass(frozen=True)
class ClusteredCentroids:
  """From scratch; the centroids of a `CentroidQuantizer` are k-means of the first query table.

  Attributes:
    iterations: of k-means.
    seed: of its beginning.
  """

  iterations: int = 25
  seed: int = 0

  def __call__(self, text: Text, model: nn.Module, variables: Variables) -> Variables:
    """The fresh variables with these centroids; ValueError where there are none."""
    del text
    embedding = model.embedding
    quantizer = getattr(embedding, "quantizer", None)
    if not isinstance(quantizer, CentroidQuantizer):
      raise ValueError(
        f"{type(embedding).__name__} has no centroids to begin with; give a DPQEmbedding with a"
        " CentroidQuantizer, or init_from=None"
      )
    own = embedding_of(variables)
    inner = {name: trees["quantizer"] for name, trees in own.items() if "quantizer" in trees}
    query, key = np.asarray(own["params"]["query"]), jax.random.key(self.seed)
    begun = clustered(quantizer, inner, query, key=key, iterations=self.iterations)
    new = {name: {**own[name], "quantizer": trees} for name, trees in begun.items()}
    return with_embedding(variables, {**own, **new})


def clustered(
  quantizer: CentroidQuantizer,
  variables: Mapping[str, Any],
  vectors: Float[Array, "N D"],
  *,
  key: PRNGKeyArray,
  iterations: int = 25,
) -> Variables:
  """A quantiser's variables with k-means of vectors, of what it is to quantise, for centroids.

  Raises:
    ValueError: the vectors have another width, are not finite, or are fewer than the codes.
  """
  options = {"shared": quantizer.shared, "additive": quantizer.additive}
  form = ProductEmbedding(
    len(vectors), quantizer.dim, quantizer.codes, quantizer.subspaces, **options
  )
  found = to_clusters(form, np.asarray(vectors), key=key, iterations=iterations)
  centers = np.asarray(found["params"]["values"], np.float32)
  if "revival" in variables:  # nobody has been revived, and no centroid is moved from its cluster
    begun = {"chosen": np.ones(centers.shape[:2], np.float32)}
    if quantizer.moving_average is None:
      begun["offset"] = np.zeros_like(centers)
    variables = {**variables, "revival": begun}
  if quantizer.moving_average is None:
    return {**variables, "params": {**variables["params"], "centroids": centers}}
  # Counts of one, and sums that make the centers the centroids.
  count = np.ones(centers.shape[:2], np.float32)
  return {**variables, "centroids": {"count": count, "total": centers}}


def embedding_of(variables: Mapping[str, Any]) -> Variables:
  """The variables of a model's embedding."""
  return {name: trees["embedding"] for name, trees in variables.items() if "embedding" in trees}


def with_embedding(variables: Mapping[str, Any], own: Mapping[str, Any]) -> Variables:
  """A model's variables with others for its embedding."""
  found = {
    name: {part: tree for part, tree in trees.items() if part != "embedding"}
    for name, trees in variables.items()
  }
  for name, tree in own.items():
    found[name] = found.get(name, {}) | {"embedding": tree}
  return {name: trees for name, trees in found.items() if trees}
