"""Measurements of trained models that several studies make."""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import linen as nn

from vqjax.lab.training import evaluate, make_scorer
from vqjax.lab.training.run_folder import EncodedText
from vqjax.lm.tokenizers import Tokenizer


def held_out_scores(
  model: nn.Module, variables: Mapping[str, Any], text: EncodedText
) -> dict[str, dict[str, Any]]:
  """Scores of the validation and the test split by a model with given variables."""
  run, scorer, scores = text.experiment, make_scorer(model), {}
  for name in ("valid", "test"):
    split = text.splits[name]
    batches = run.loader.whole(split, batch=run.train.batch, context=model.context)
    scores[name] = evaluate(scorer, variables, batches, run.loader.text_bytes(split)).numbers()
  return scores


def single_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> dict[str, int]:
  """The token of each word that is one known token."""
  tokens = {}
  for word in words:
    encoded = tokenizer.encode(word, special=False)
    if len(encoded) == 1 and tokenizer.decode(encoded).strip() == word:
      tokens[word] = encoded[0]
  return tokens
