"""Run the study of DPQ: the paper's embeddings and its baselines.

python -m experiments.studies.dpq.run --scale smoke
python -m experiments.studies.dpq.run --scale cpu          run what has no result yet, then render
python -m experiments.studies.dpq.run --scale cpu --list   list the runs and which are done
python -m experiments.studies.dpq.run --scale cpu --only ptb-small/sx,ptb-small/full
python -m experiments.studies.dpq.run --render             update the page from the kept results

A task is a pattern: 'ptb-*' is language modelling, 'ag-news/*' and 'dbpedia/*' are text
classification, 'multi30k/*' is translation, and 'bert*' is BERT with its fine-tuning. A run that
was stopped continues from its checkpoint. Results are lines of results.jsonl.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.studies.dpq import report
from experiments.studies.dpq.models.translator import Translator
from experiments.studies.dpq.rows import DPQRow, full, rows
from experiments.studies.dpq.settings import HEADLINE, SCALES, DPQSetting
from experiments.studies.dpq.translation import bleu
from experiments.studies.study import PaperStudy
from experiments.studies.words import single_tokens
from vqjax import DPQEmbedding, Embedding
from vqjax.convert import part_of, squared_error, with_part
from vqjax.convert.trained_variables import Variables
from vqjax.lab import exits
from vqjax.lab.config import Experiment, with_vocab
from vqjax.lab.data import fit_tokenizer
from vqjax.lab.study.compressed import held_out_scores
from vqjax.lab.study.jobs import StudyJob, derived, training_job
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.checkpoint import check_tokenizer
from vqjax.lab.training.run_folder import EncodedText, load_text
from vqjax.lm.tokenizers import Tokenizer
from vqjax.ops import quantize

PROBES, NEIGHBOURS = ("monopoly", "toronto", "quickly"), 9
"""Words whose nearest neighbours are kept, and their number: Tables 5 to 7."""


@dataclasses.dataclass(frozen=True)
class FromPart:
  """Initialises one part of a model, such as its encoder, from another run.

  Attributes:
    folder: the other run's folder.
    part: name of the part in both models.
  """

  folder: str
  part: str

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The fresh variables with the other run's part; ValueError for another tokenizer."""
    check_tokenizer(self.folder, text)
    trained, _ = read_run_variables(self.folder)
    return with_part(variables, self.part, part_of(trained, self.part))


def jobs(scale: str) -> list[StudyJob]:
  """All jobs of a scale, each after those that it starts from."""
  every = []
  for s in SCALES[scale].values():
    own = rows(s)
    for seed in range(s.seeds):
      every += [
        _trained(s, row, seed)
        for row in own
        if row.derive is None and (seed == 0 or row.name in HEADLINE)
      ]
    every += [_derived(s, row) for row in own if row.derive is not None]
  return every


def _trained(s: DPQSetting, row: DPQRow, seed: int = 0) -> StudyJob:
  name = f"{s.name}/{row.name}" + (f"-s{seed}" if seed else "")
  experiment, needs = s.make(row.name, row.embedding, seed=seed), ()
  if s.before is not None:
    start = FromPart(f"{s.folder}/{s.before}/{row.name}-{seed}", "encoder")
    experiment = dataclasses.replace(experiment, init_from=start)
    needs = (f"{s.before}/{row.name}",)
  beside = functools.partial(measure_trained, words=s.words)
  return training_job(name, row.label, experiment, s.path(row.name, seed), beside, needs)


def _derived(s: DPQSetting, row: DPQRow) -> StudyJob:
  source = _trained(s, DPQRow("full", "Full", full(s)))
  experiment, folder = s.make("full", full(s), seed=0), pathlib.Path(s.path("full"))
  # A field that is newer than the kept results counts where it is set.
  settings = {"embedding": repr(row.embedding).replace("    rotated = False\n", "")}
  measure = lambda: measure_derived(experiment, folder, row)
  return derived(f"{s.name}/{row.name}", row.label, source, settings, measure)


def measure_trained(
  experiment: Experiment, folder: pathlib.Path, words: bool = False
) -> dict[str, Any]:
  """Measurements of a run's embedding, and BLEU if it translates.

  Args:
    experiment: experiment of the run.
    folder: folder of the run.
    words: whether neighbours of words, and the number of tokens on each code, are among them.
  """
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  model = with_vocab(experiment, tokenizer.vocab).model
  embedding = model.embedding
  variables, _ = read_run_variables(folder)
  # BERT's tasks hold the embedding in their encoder.
  in_encoder = "embedding" not in variables["params"]
  own = part_of(part_of(variables, "encoder") if in_encoder else variables, "embedding")
  measured = {"neighbours": nearest_words(embedding, own, tokenizer)} if words else {}
  if isinstance(embedding, DPQEmbedding):
    encode = jax.jit(lambda own, tokens: embedding.apply(own, tokens, method="codes_of"))
    codes_VM = encode(own, jnp.arange(embedding.vocab))
    counts_MK = quantize.code_counts(codes_VM, embedding.quantizer.codes)
    perplexity_M = np.asarray(quantize.code_perplexity(counts_MK), np.float64)
    measured["codes"] = {
      "perplexity": {"mean": float(perplexity_M.mean()), "least": float(perplexity_M.min())}
    }
    if words:
      measured["codes"]["counts"] = np.asarray(counts_MK, int).tolist()
  if isinstance(model, Translator):
    measured["bleu"] = bleu(experiment, model, variables)
  return measured


def nearest_words(
  embedding: Embedding, variables: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, list[tuple[str, float]]]:
  """The nearest other words of each word of `PROBES`, with their cosines."""
  table_VD = np.asarray(embedding.apply(variables, method="table"), np.float64)
  unit_VD = table_VD / np.maximum(np.linalg.norm(table_VD, axis=1, keepdims=True), 1e-12)
  nearest = {}
  for word, token in single_tokens(tokenizer, PROBES).items():
    cosine_V = unit_VD @ unit_VD[token]
    cosine_V[token] = -np.inf
    best = np.argsort(-cosine_V, kind="stable")[:NEIGHBOURS]
    nearest[word] = [(tokenizer.decode([t]), float(min(cosine_V[t], 1.0))) for t in best]
  return nearest


def measure_derived(experiment: Experiment, folder: pathlib.Path, row: DPQRow) -> dict[str, Any]:
  """Scores of a trained model whose embedding is replaced by a derived one."""
  text = load_text(experiment)
  variables, _ = read_run_variables(folder)
  table_VD = np.asarray(variables["params"]["embedding"]["weight"])
  model = experiment.model.clone(embedding=row.embedding)
  model = with_vocab(dataclasses.replace(experiment, model=model), len(table_VD)).model
  filled = row.derive(model.embedding, table_VD)
  variables = with_part(variables, "embedding", filled)
  result: dict[str, Any] = held_out_scores(model, variables, text)
  rebuilt_VD = model.embedding.apply(filled, method="table")
  result["embedding"] = {
    "class": type(row.embedding).__name__,
    "shipped_bytes": model.embedding.inference_size().state_bytes,
    "lost": squared_error(rebuilt_VD, table_VD) / squared_error(0 * table_VD, table_VD),
  }
  return {"result": result}


STUDY = PaperStudy(
  name="dpq",
  description=__doc__,
  scales=tuple(SCALES),
  jobs=jobs,
  tables=report.shown_tables,
  update=report.update,
)

if __name__ == "__main__":
  exits.run_main(STUDY.main)
