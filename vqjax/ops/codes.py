"""What distribution do tokens have that share the score of a code?

Every token v sits on one code c(v); its score is hidden · codebook[c(v)] + b_v. Then

  p(v) = p(code c(v)) · p(v | code),   p(v | code) = exp(b_v) / sum of exp(b_u) over u on the code,

so the normaliser is a softmax over K codes whose bias is the log-mass of each code. It needs no
array of the vocabulary's size for each token, and is exact. Without a bias the mass of a code is
the number of its tokens. Source: VQ-Logits, Eq. 2-5, without the [*B, V] gather of Eq. 3.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from vqjax.ops import softmax
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype


def log_mass(
  assignment: Int[Array, "V"], codes: int, bias: Float[Array, "V"] | None = None
) -> Float[Array, "{codes}"]:
  """Log of each code's mass: log sum of exp(bias) over its tokens; of their number without bias.

  -inf for a code on which no token sits, which removes it from the distribution.
  """
  if bias is None:
    return jnp.log(jnp.bincount(assignment, length=codes).astype(jnp.float32))
  bias_V = bias.astype(jnp.float32)
  top_K = jax.lax.stop_gradient(jax.ops.segment_max(bias_V, assignment, codes))
  shift_K = jnp.where(jnp.isneginf(top_K), 0.0, top_K)
  sum_K = jax.ops.segment_sum(jnp.exp(bias_V - shift_K[assignment]), assignment, codes)
  # log 0 is right for an empty code, but its derivative is not finite: keep it out of the gradient.
  empty_K = sum_K == 0
  return jnp.where(empty_K, -jnp.inf, jnp.log(jnp.where(empty_K, 1.0, sum_K)) + shift_K)


def code_log_prob(
  hidden: Float[Array, "*B D"],
  codebook: Float[Array, "K D"],
  assignment: Int[Array, "V"],
  tokens: Integer[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  dtype: Dtype | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of `tokens`, each scored by the code it sits on.

  O(N·K·D) time; O(V) once, for the mass of the codes; no array of N·V elements. A token outside
  [0, V) gives nan, as does one whose code is not in [0, K). `dtype` is that of the matrix
  product's operands, as in `linear_log_prob`.
  """
  mass_K = log_mass(assignment, codebook.shape[0], bias)
  known, token = in_vocabulary(tokens, assignment.shape[0])
  code = assignment[token].astype(jnp.int32)
  log_prob_code = softmax.linear_log_prob(hidden, codebook, code, mass_K, dtype=dtype)
  bias_B = 0.0 if bias is None else bias[token].astype(jnp.float32)
  # On a code whose tokens all have bias -inf nothing has a probability, and no share of it.
  within = jnp.where(jnp.isneginf(mass_K[code]), 0.0, bias_B - mass_K[code])
  return jnp.where(known, log_prob_code + within, jnp.nan)


def draw_within(
  key: PRNGKeyArray,
  code: Int[Array, "*B"],
  assignment: Int[Array, "V"],
  codes: int,
  bias: Float[Array, "V"] | None = None,
) -> Int[Array, "*B"]:
  """A token on the given code with probability proportional to exp(bias), uniform without bias.

  The tokens of each row's code are visited 128 at a time, up to the largest code drawn.
  """
  order_V = jnp.argsort(assignment)
  count_K = jnp.bincount(assignment, length=codes)
  first_K = jnp.cumsum(count_K) - count_K
  first, count = first_K[code], count_K[code]
  if bias is None:
    place = jax.random.randint(key, code.shape, 0, jnp.maximum(count, 1))
    return order_V[first + place].astype(jnp.int32)

  def visit(carry):
    step, best, chosen = carry
    place_W = step * 128 + jnp.arange(128, dtype=jnp.int32)
    token_BW = order_V.at[first[..., None] + place_W].get(mode="clip")
    noise_BW = jax.random.gumbel(
      jax.random.fold_in(key, step), token_BW.shape, jnp.float32, mode="high"
    )
    score_BW = jnp.where(place_W < count[..., None], bias[token_BW] + noise_BW, -jnp.inf)
    winner = jnp.argmax(score_BW, axis=-1)[..., None]
    top = jnp.take_along_axis(score_BW, winner, axis=-1)[..., 0]
    token = jnp.take_along_axis(token_BW, winner, axis=-1)[..., 0].astype(jnp.int32)
    return step + 1, jnp.maximum(best, top), jnp.where(top > best, token, chosen)

  start = (
    jnp.int32(0),
    jnp.full(code.shape, -jnp.inf, jnp.float32),
    jnp.full(code.shape, -1, jnp.int32),
  )
  return jax.lax.while_loop(lambda carry: carry[0] * 128 < count.max(initial=0), visit, start)[2]
