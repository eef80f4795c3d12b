"""A Linen model with a compressed output head: loss, gradient, sampling."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from vqjax import CodebookHead, DenseEmbedding

VOCAB, DIM = 50_257, 64


class Model(nn.Module):
  """An embedding, a body of one layer, and a codebook head."""

  def setup(self):
    self.embedding = DenseEmbedding(vocab=VOCAB, dim=DIM)
    self.body = nn.Dense(DIM)
    self.head = CodebookHead(vocab=VOCAB, dim=DIM, codes=1024, token_bias=True)

  def __call__(self, tokens, targets):
    hidden = nn.gelu(self.body(self.embedding(tokens)))
    return -self.head.log_prob(hidden, targets).mean()

  def next_token(self, tokens, key):
    hidden = nn.gelu(self.body(self.embedding(tokens)))
    return self.head.sample(hidden, key, temperature=0.8, top_k=50)


def main():
  model = Model()
  tokens = jnp.array([[464, 3290, 318]])
  variables = model.init(jax.random.key(0), tokens, tokens)

  # The assignment of tokens to codes is in the collection "codes": saved, never trained.
  loss = lambda params: model.apply(variables | {"params": params}, tokens, tokens)
  value, gradient = jax.jit(jax.value_and_grad(loss))(variables["params"])
  size = model.bind(variables).head.size()
  print(f"loss {value:.2f} nats; the head has {size.params:,} parameters")
  print("gradient of the codebook:", gradient["head"]["codebook"].shape)
  print("sampled:", model.apply(variables, tokens, jax.random.key(1), method="next_token"))


if __name__ == "__main__":
  main()
