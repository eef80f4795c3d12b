"""A grouped head in an NNX model, through Flax's bridge."""

import jax.numpy as jnp
from flax import nnx
from flax.nnx import bridge

from vqjax import GroupedHead

VOCAB, DIM = 50_257, 64


class Model(nnx.Module):
  """An embedding and a grouped head."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
    self.head = bridge.ToNNX(GroupedHead(vocab=VOCAB, dim=DIM), rngs=rngs)
    bridge.lazy_init(self.head, jnp.zeros((1, DIM)))

  def loss(self, tokens, targets):
    return -self.head(self.embed(tokens), targets, method="log_prob").mean()


def main():
  model = Model(nnx.Rngs(0))
  tokens = jnp.array([[464, 3290, 318]])
  value, _ = nnx.jit(nnx.value_and_grad(lambda model: model.loss(tokens, tokens)))(model)
  print(f"loss {value:.2f} nats")


if __name__ == "__main__":
  main()
