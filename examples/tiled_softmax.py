"""The tiled softmax of a model that already has its output weight."""

import jax
import jax.numpy as jnp

from vqjax import linear_cross_entropy, linear_soft_target_loss, linear_softmax

VOCAB, DIM = 50_257, 64


def main():
  hidden = jax.random.normal(jax.random.key(0), (8, 128, DIM))
  weight = jax.random.normal(jax.random.key(1), (VOCAB, DIM)) / 8
  tokens = jnp.zeros((8, 128), jnp.int32)

  # One loss a token, in nats. Padded positions have weight 0, whatever their token.
  loss = lambda hidden, weight: linear_cross_entropy(
    hidden, weight, tokens, z_loss=1e-4, label_smoothing=0.1, softcap=30.0
  ).mean()
  value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight)
  print(f"loss {value:.2f} nats; gradients {[g.shape for g in gradients]}")

  # Further results of the same pass, all differentiable. A frozen weight costs no gradient.
  frozen = jax.lax.stop_gradient(weight)
  result = linear_softmax(hidden, frozen, tokens, entropy=True, top_k=5)
  print(f"log Z {result.log_z.mean():.2f}, entropy {result.entropy.mean():.2f} nats")
  print("best tokens:", result.top_tokens[0, 0])

  # Distillation from a teacher of another width, without the logits of either model.
  teacher_hidden, teacher_weight = jnp.ones((8, 128, 96)), jnp.ones((VOCAB, 96))
  divergence = linear_soft_target_loss(hidden, weight, teacher_hidden, teacher_weight).kl
  print(f"KL divergence from the teacher {divergence.mean():.2f} nats")


if __name__ == "__main__":
  main()
