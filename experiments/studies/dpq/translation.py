"""Translations of test sentences by beam search, and their BLEU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sacrebleu
from jax import lax
from jaxtyping import Array, Float, Int

from experiments.studies.dpq.models.translator import Translator
from vqjax.lab.config import Experiment
from vqjax.lab.data import encode_document, fit_tokenizer
from vqjax.lab.data.pipeline import NONE
from vqjax.lm.tokenizers import Tokenizer

BEAMS, PENALTY, SENTENCES = 4, 0.6, 50
"""Beams of the search, its length penalty, and sentences of a batch."""

Step = Callable[[Array, Array], tuple[Float[Array, "N k"], Int[Array, "N k"]]]
"""(tokens [N, T], n) -> log-probabilities and tokens of the likeliest after the first n tokens."""


def beam_search(
  step: Step, *, rows: int, beams: int, length: int, eos: int, penalty: float
) -> Int[Array, "B T"]:
  """The sequence of highest log p / ((5 + n) / 6)^penalty of each row, then `NONE`.

  Here n is the number of tokens with `eos`, which is not returned. Each row keeps its `beams` most
  likely unfinished sequences. The search stops when no unfinished sequence can become better than
  the best finished one; without a finished one, it returns the best of full length. Source: Wu et
  al., Google's neural machine translation system, 2016, Eq. 14, without its coverage penalty.

  Args:
    step: the next tokens, 2·beams or more (or all of a smaller vocabulary), of each sequence; row b
      has the sequences b·beams to (b + 1)·beams - 1.
    rows: B.
    beams: K, number of sequences of a row; 1 is greedy decoding.
    length: largest number of tokens of a sequence, with `eos`, T.
    eos: token that ends a sequence.
    penalty: 0 compares log-probabilities and so prefers short sequences; 1 compares nearly their
      means over tokens.
  """
  weight = lambda n: ((5.0 + n) / 6.0) ** penalty
  take = lambda x, index: jnp.take_along_axis(x, index[..., None], axis=1)
  none = jnp.full((rows, beams), -jnp.inf)
  empty = jnp.full((rows, beams, length), NONE, jnp.int32)

  def goes_on(beam):
    n, _, score_BK, _, rank_BK = beam
    # An upper bound: further tokens add at most 0, and the weight of the full length divides most.
    possible_B = score_BK.max(axis=1) / weight(length)
    return (n < length) & (possible_B > rank_BK.max(axis=1)).any()

  def extend(beam):
    n, tokens_BKT, score_BK, finished_BKT, rank_BK = beam
    log_prob, token = (x.reshape(rows, beams, -1) for x in step(tokens_BKT.reshape(-1, length), n))
    count = token.shape[-1]
    total = (score_BK[..., None] + log_prob).reshape(rows, -1)
    # 2·beams candidates: up to `beams` of them may end, and `beams` must remain.
    best, index = lax.top_k(total, min(2 * beams, beams * count))
    token = jnp.take_along_axis(token.reshape(rows, -1), index, axis=1)
    longer = take(tokens_BKT, index // count).at[:, :, n].set(token)
    ends = token == eos
    rank = jnp.where(ends, best / weight(n + 1), -jnp.inf)
    rank_BK, chosen = lax.top_k(jnp.concatenate([rank_BK, rank], axis=1), beams)
    finished_BKT = take(jnp.concatenate([finished_BKT, longer], axis=1), chosen)
    score_BK, kept = lax.top_k(jnp.where(ends, -jnp.inf, best), beams)
    return n + 1, take(longer, kept), score_BK, finished_BKT, rank_BK

  # All sequences of a row start equal: only the first one is present, or all beams would be copies.
  start = jnp.int32(0), empty, none.at[:, 0].set(0.0), empty, none
  _, tokens_BKT, _, finished_BKT, rank_BK = lax.while_loop(goes_on, extend, start)
  has_ended = jnp.isfinite(rank_BK[:, :1])
  best_BT = jnp.where(has_ended, finished_BKT[:, 0], tokens_BKT[:, 0])
  return jnp.where(best_BT == eos, NONE, best_BT)


def translate(
  model: Translator,
  variables: Mapping[str, Any],
  source: Int[Array, "B S"],
  eos: int,
  beams: int = BEAMS,
) -> Int[Array, "B T"]:
  """The best translation of each source by beam search.

  Each step decodes its sequences from their beginning, so that none has a state of its own.
  """
  memory, _ = model.apply(variables, source, method="encode")
  key, value, real = memory
  memory = *(jnp.repeat(x, beams, axis=1) for x in (key, value)), jnp.repeat(real, beams, axis=0)
  count = min(2 * beams, model.head.vocab)

  def step(tokens, n):
    target = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=eos)
    return model.apply(variables, target, n, memory, count, method="next_tokens")

  options = {"rows": len(source), "beams": beams, "length": model.context}
  return beam_search(step, **options, eos=eos, penalty=PENALTY)


def bleu(experiment: Experiment, model: Translator, variables: Mapping[str, Any]) -> dict[str, Any]:
  """BLEU of a model's test translations, cased and detokenised, by sacrebleu."""
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  sources, references = zip(*experiment.data.pairs("test"), strict=True)
  metric = sacrebleu.BLEU()
  score = metric.corpus_score(translations(model, variables, tokenizer, sources), [references])
  return {"score": score.score, "signature": str(metric.get_signature())}


def translations(
  model: Translator, variables: Mapping[str, Any], tokenizer: Tokenizer, sources: Sequence[str]
) -> list[str]:
  """The translation of each source by beam search, in the order of the sources."""
  eos = tokenizer.eos[0]
  encoded = [encode_document(tokenizer, source)[: model.context] for source in sources]
  search = jax.jit(lambda variables, source: translate(model, variables, source, eos))
  texts = [""] * len(sources)
  # Sources of similar length share a batch, so that few steps of the search are wasted.
  order = sorted(range(len(sources)), key=lambda at: len(encoded[at]))
  for first in range(0, len(order), SENTENCES):
    chosen = order[first : first + SENTENCES]
    # All batches have one shape, so that the program is compiled once.
    batch = np.full((SENTENCES, model.context), NONE, np.int32)
    batch[:, 0] = eos
    for row, at in enumerate(chosen):
      batch[row, : len(encoded[at])] = encoded[at]
    tokens = np.asarray(search(variables, batch))
    for row, at in enumerate(chosen):
      texts[at] = tokenizer.decode(tokens[row][tokens[row] >= 0].tolist()).strip()
  return texts
