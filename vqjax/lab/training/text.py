"""Which tokens does an experiment train and test on?"""

import dataclasses
from collections.abc import Sized

from vqjax.lab.config import Experiment, with_vocab
from vqjax.lab.data import TokenSplit, encode_split, fit_encoder
from vqjax.lab.data.source import SPLITS, Prepared


@dataclasses.dataclass(frozen=True)
class Text:
  """An experiment's text, encoded.

  Attributes:
    experiment: the experiment with its modules' vocabulary filled in from the tokenizer.
    splits: "train", "valid" and "test" -> tokens, or what the loader reads in their place.
    identity: what must not change while a run is resumed: fingerprint and sizes.
  """

  experiment: Experiment
  splits: dict[str, TokenSplit | Sized]
  identity: dict


def load_text(experiment: Experiment) -> Text:
  """Gives an experiment its splits, and fills in the vocabulary.

  Fits the tokenizer and encodes the text, both cached by content; data that are no text have their
  splits already.

  Raises:
    ValueError: the model has another vocabulary than the tokenizer, or the text cannot be used.
  """
  data = experiment.data
  if (experiment.tokenizer is None) != isinstance(data, Prepared):
    raise ValueError(
      f"data {type(data).__name__} beside tokenizer {experiment.tokenizer}; text needs a tokenizer,"
      " and what is no text has None"
    )
  encoder = None if experiment.tokenizer is None else fit_encoder(data, experiment.tokenizer)
  vocab = data.vocab if encoder is None else encoder.vocab
  resolved = with_vocab(experiment, vocab)
  read = data.split if encoder is None else lambda name: encode_split(data, encoder, name)
  splits = {name: read(name) for name in SPLITS}
  sizes = {name: len(getattr(split, "tokens", split)) for name, split in splits.items()}
  empty = [name for name, size in sizes.items() if not size]
  if empty:
    raise ValueError(
      f"{data} has no text for {', '.join(empty)}; every split needs some: add it, or choose other"
      " data"
    )
  identity = {
    "text": data.fingerprint(),
    "tokenizer": encoder and encoder.fingerprint(),
    "vocab": vocab,
    "tokens": sizes,
  }
  return Text(resolved, splits, identity)
