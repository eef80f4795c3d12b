"""How good is a model as it begins, before it is trained?"""

from typing import Any

from vqjax.lab.config import Experiment
from vqjax.lab.training import evaluate, make_scorer
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run import load_text
from vqjax.sharding import make_mesh


def scores(experiment: Experiment) -> dict[str, Any]:
  """{"result": scores of both held-out splits, and sizes} of what `Experiment.init_from` gives."""
  text = load_text(experiment)
  run = text.experiment
  program = Program(run, make_mesh(run.train.mesh))
  init_key, _ = keys(run.seed)
  variables = run.init_from(text, run.model, program.init(init_key).variables)
  scorer, found = make_scorer(run.model), {}
  for name in ("valid", "test"):
    split = text.splits[name]
    batches = run.loader.whole(split, batch=run.train.batch, context=run.model.context)
    found[name] = evaluate(scorer, variables, batches, run.loader.text_bytes(split)).known()
  head = run.model.head
  own = {"class": type(head).__name__, "params": head.size().params}
  return {"result": {**found, "head": own}}
