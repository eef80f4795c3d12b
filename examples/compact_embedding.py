"""A DPQ embedding in training, and the compact file that replaces its table."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp

from vqjax import CompactEmbedding, DPQEmbedding, SoftmaxQuantizer


def main():
  quantizer = SoftmaxQuantizer(codes=32, subspaces=32)  # DPQ-SX; CentroidQuantizer is DPQ-VQ
  embedding = DPQEmbedding(vocab=50_257, dim=128, quantizer=quantizer)
  tokens = jnp.array([[464, 3290, 318]])
  variables = embedding.init(jax.random.key(0), tokens)

  # In training: the vectors, and the quantiser's terms of the loss; batch statistics are updated.
  (vectors, terms), updates = embedding.apply(
    variables, tokens, False, method="loss_terms", mutable=["batch_stats"]
  )
  print(f"vectors {vectors.shape}; loss terms {sorted(terms)}; updates {sorted(updates)}")

  # For inference: packed codes and values in one safetensors file, equal bit for bit.
  compact = embedding.compact(variables)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "embedding.safetensors")
    compact.save(path)
    loaded = CompactEmbedding.load(path)
    assert (loaded(tokens) == embedding.apply(variables, tokens)).all()
  print(f"{compact.nbytes:,} bytes, {compact.compression_ratio():.1f} times smaller")


if __name__ == "__main__":
  main()
