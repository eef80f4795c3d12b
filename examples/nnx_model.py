"""An NNX model with a compressed output head: training, a checkpoint, sampling."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from vqjax.nnx import CodebookHead

VOCAB, DIM = 1_000, 32


class Model(nnx.Module):
  """An embedding, a body of one layer, and a codebook head."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
    self.body = nnx.Linear(DIM, DIM, rngs=rngs)
    # Tied instead: vqjax.nnx.DenseHead(VOCAB, DIM, embedding=self.embed, rngs=rngs), and
    # self.head.tied(self.embed).log_prob(...) below, which NNX's tree mode allows too.
    self.head = CodebookHead(VOCAB, DIM, codes=100, token_bias=True, rngs=rngs)

  def hidden(self, tokens):
    return nnx.gelu(self.body(self.embed(tokens)))

  def loss(self, tokens, targets):
    return -self.head.log_prob(self.hidden(tokens), targets).mean()


@nnx.jit
def step(model, optimizer, tokens, targets):
  """One step of AdamW, which leaves the head's table of codes alone."""
  # By parts: in NNX's tree mode gradients are those of all arguments, and codes are integers.
  graph, params, rest = nnx.split(model, nnx.Param, ...)
  of_params = lambda params, rest: nnx.merge(graph, params, rest).loss(tokens, targets)
  loss, gradient = nnx.value_and_grad(of_params)(params, rest)
  optimizer.update(model, gradient)
  return loss


def main():
  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
  text = jax.random.randint(jax.random.key(1), (8, 17), 0, VOCAB)
  for number in range(30):
    loss = step(model, optimizer, text[:, :-1], text[:, 1:])
    if number % 10 == 0:
      print(f"step {number}: {loss:.2f} nats")

  with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    path = pathlib.Path(folder) / "model"
    checkpointer.save(path, nnx.state(model))
    checkpointer.wait_until_finished()
    graph, empty = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    restored = nnx.merge(graph, checkpointer.restore(path, empty))

  hidden = restored.hidden(text[:, -1])
  print("sampled:", restored.head.sample(hidden, jax.random.key(2), temperature=0.8, top_k=50))
  print("equal:", bool(jnp.array_equal(hidden, model.hidden(text[:, -1]))))


if __name__ == "__main__":
  main()
