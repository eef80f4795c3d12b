"""A head whose vocabulary is sharded over the devices of a mesh."""

import jax
import jax.numpy as jnp

from vqjax import DenseHead
from vqjax.sharding import MeshShape, make_mesh


def main():
  devices = jax.device_count()
  head = DenseHead(vocab=50_257, dim=64, vocab_axis="model")
  hidden = jax.random.normal(jax.random.key(0), (8, 64))
  tokens = jnp.zeros((8,), jnp.int32)
  with jax.set_mesh(make_mesh(MeshShape(model=devices))):
    variables = jax.jit(head.init)(jax.random.key(1), hidden)
    log_prob = jax.jit(lambda v: head.apply(v, hidden, tokens, method="log_prob"))(variables)
  print(f"mean log-probability on {devices} device(s): {log_prob.mean():.3f} nats")


if __name__ == "__main__":
  main()
