"""Policy gradients (GRPO) for an NNX model with a compressed output head."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vqjax.nnx import CodebookHead

VOCAB, DIM, LENGTH, GROUP = 1_000, 32, 8, 16


class Policy(nnx.Module):
  """A policy that sees the last token: an embedding, a layer, and a codebook head."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
    self.body = nnx.Linear(DIM, DIM, rngs=rngs)
    self.head = CodebookHead(VOCAB, DIM, codes=100, token_bias=True, rngs=rngs)

  def hidden(self, tokens):
    return nnx.gelu(self.body(self.embed(tokens)))

  def log_prob(self, text):
    """Log-probabilities of the tokens after the first, without logits."""
    return self.head.log_prob(self.hidden(text[:, :-1]), text[:, 1:])


@nnx.jit
def roll_out(policy, prompts, key):
  """Completions of `prompts` at temperature 1, whose probabilities `log_prob` has."""
  text = [prompts]
  for step in range(LENGTH):
    drawn = policy.head.sample(policy.hidden(text[-1]), jax.random.fold_in(key, step))
    text.append(drawn)
  return jnp.stack(text, axis=1)


def reward(text):
  """The fraction of a completion's tokens that are below 100."""
  return (text[:, 1:] < 100).mean(axis=1)


def clipped_loss(policy, text, old, advantage):
  """The clipped objective of PPO, averaged over tokens and with the sign of a loss."""
  ratio = jnp.exp(policy.log_prob(text) - old)
  bound = jnp.clip(ratio, 0.8, 1.2)
  return -jnp.minimum(ratio * advantage[:, None], bound * advantage[:, None]).mean()


def loss_of_parts(params, rest, graph, *args):
  """The loss as a function of the parameters, for gradients in NNX's tree mode too."""
  return clipped_loss(nnx.merge(graph, params, rest), *args)


@nnx.jit
def update(policy, optimizer, text):
  """Two steps of the optimizer on one batch of completions."""
  old, score = policy.log_prob(text), reward(text)
  # GRPO: the advantage is the reward relative to the completions of one prompt.
  group = score.reshape(-1, GROUP)
  advantage = (group - group.mean(1, keepdims=True)) / (group.std(1, keepdims=True) + 1e-6)
  for _ in range(2):
    graph, params, rest = nnx.split(policy, nnx.Param, ...)
    gradient_of = nnx.grad(loss_of_parts)
    gradient = gradient_of(params, rest, graph, text, old, advantage.reshape(-1))
    optimizer.update(policy, gradient)
  return score.mean()


def main():
  policy = Policy(nnx.Rngs(0))
  optimizer = nnx.Optimizer(policy, optax.adam(1e-2), wrt=nnx.Param)
  prompts = jnp.repeat(jnp.arange(8), GROUP)
  for number in range(31):
    text = roll_out(policy, prompts, jax.random.fold_in(jax.random.key(1), number))
    mean = update(policy, optimizer, text)
    if number % 10 == 0:
      print(f"step {number}: {mean:.0%} of the tokens are below 100")


if __name__ == "__main__":
  main()
