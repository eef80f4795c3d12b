"""Which tokens does an experiment train and test on?"""

import dataclasses

from vqjax.config import Experiment, with_vocab
from vqjax.data import TokenSplit, encode_split, fit_encoder


@dataclasses.dataclass(frozen=True)
class Text:
  """An experiment's text, encoded.

  Attributes:
    experiment: the experiment with its modules' vocabulary filled in from the tokenizer.
    splits: "train", "valid" and "test" -> tokens.
    identity: what must not change while a run is resumed: fingerprint and sizes.
  """

  experiment: Experiment
  splits: dict[str, TokenSplit]
  identity: dict


def load_text(experiment: Experiment) -> Text:
  """Fits the tokenizer, encodes the splits (both cached by content), and fills in the vocabulary.

  Raises:
    ValueError: the model has another vocabulary than the tokenizer, or the text cannot be used.
  """
  encoder = fit_encoder(experiment.data, experiment.tokenizer)
  resolved = with_vocab(experiment, encoder.vocab)
  splits = {
    name: encode_split(experiment.data, encoder, name) for name in ("train", "valid", "test")
  }
  empty = [name for name, split in splits.items() if not len(split.tokens)]
  if empty:
    raise ValueError(
      f"{experiment.data} has no text for {', '.join(empty)}; every split needs some: add it, or"
      " choose other data"
    )
  identity = {
    "text": experiment.data.fingerprint(),
    "tokenizer": encoder.fingerprint(),
    "vocab": encoder.vocab,
    "tokens": {name: len(split.tokens) for name, split in splits.items()},
  }
  return Text(resolved, splits, identity)
