"""How good is a trained model whose embedding is replaced by a smaller one made of it?"""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from experiments.studies.dpq.bleu import scored
from experiments.studies.dpq.rows import Fill
from vqjax import Embedding
from vqjax.convert.reconstruct import squared_error
from vqjax.lab.config import Experiment, with_vocab
from vqjax.lab.conversion.tables import with_embedding
from vqjax.lab.models import EncoderDecoder
from vqjax.lab.training import evaluate, make_scorer, read_variables
from vqjax.lab.training.run import load_text


def replaced(
  experiment: Experiment, folder: pathlib.Path, embedding: Embedding, fill: Fill
) -> dict[str, Any]:
  """Scores of a run of a `DenseEmbedding` with another in its place: {"result", beside}."""
  text = load_text(experiment)
  variables, _ = read_variables(folder)
  table = np.asarray(variables["params"]["embedding"]["weight"])
  other = dataclasses.replace(experiment, model=experiment.model.clone(embedding=embedding))
  model = with_vocab(other, len(table)).model
  filled = fill(model.embedding, table)
  variables = with_embedding(variables, filled)
  scorer = make_scorer(model)
  scores = {}
  for name in ("valid", "test"):
    split = text.splits[name]
    batches = experiment.loader.whole(split, batch=experiment.train.batch, context=model.context)
    size = experiment.loader.text_bytes(split)
    scores[name] = evaluate(scorer, variables, batches, size).known()
  size = model.embedding.shipped()
  whole = model.embedding.apply(filled, method="table")
  lost = squared_error(whole, table) / squared_error(0 * table, table)
  own = {"class": type(embedding).__name__, "shipped_bytes": size.state_bytes, "lost": lost}
  beside = scored(experiment, model, variables) if isinstance(model, EncoderDecoder) else {}
  return {"result": {**scores, "embedding": own}, **beside}
