"""Run the study of DPQ: the paper's embeddings and its baselines.

python -m experiments.studies.dpq.run --scale smoke
python -m experiments.studies.dpq.run --scale cpu          run what has no result yet, then render
python -m experiments.studies.dpq.run --scale cpu --list   list the runs and which are done
python -m experiments.studies.dpq.run --scale cpu --only ptb-small/sx,ptb-small/full
python -m experiments.studies.dpq.run --render             update the page from the kept results

A run that was stopped continues from its checkpoint. Results are lines of results.jsonl.
"""

import dataclasses
import functools
import itertools
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.dpq import report
from experiments.studies.dpq.models import EncoderDecoder
from experiments.studies.dpq.rows import DPQRow, full, rows
from experiments.studies.dpq.settings import HEADLINE, SCALES, DPQSetting
from experiments.studies.dpq.starts import FromPart, FromTable
from experiments.studies.dpq.translation import bleu
from experiments.studies.study import PaperStudy
from experiments.studies.words import single_tokens
from vqjax import DPQEmbedding, Embedding
from vqjax.convert import part_of, squared_error, with_part
from vqjax.lab import exits
from vqjax.lab.config import Experiment, with_vocab
from vqjax.lab.data import fit_tokenizer
from vqjax.lab.study.compressed import held_out_scores
from vqjax.lab.study.jobs import StudyJob, derived, training_job
from vqjax.lab.training import read_run_variables, saved_steps
from vqjax.lab.training.run_folder import load_text
from vqjax.lm.tokenizers import Tokenizer
from vqjax.ops import quantize

FAMILIES = (
  ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
  ("reagan", "bush", "obama", "clinton", "putin"),
  ("toronto", "london", "paris", "tokyo", "chicago", "boston", "berlin"),
)
"""Words of one kind each, as in the paper's Table 8; their codes are kept."""

PROBES = "monopoly", "toronto", "quickly"
"""Words whose nearest neighbours are kept: Tables 5 to 7."""
NEIGHBOURS = 9
CODES = 12
"""Codes of a word that are kept."""


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
  start, needs = None, ()
  if row.start is not None:
    start, needs = FromTable(s.path("full", seed), row.start), (f"{s.name}/full",)
  if s.before is not None:
    start = FromPart(f"{s.folder}/{s.before}/{row.name}-{seed}", "encoder")
    needs = (f"{s.before}/{row.name}",)
  experiment = s.make(row.name, row.embedding, seed=seed)
  if start is not None:
    experiment = dataclasses.replace(experiment, init_from=start)
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
    words: whether neighbours and codes of words, and the tokens on each code, are among them.
  """
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  embedding = with_vocab(experiment, tokenizer.vocab).model.embedding
  variables, _ = read_run_variables(folder)
  own = _embedding_variables(variables)
  measured = {"neighbours": nearest_words(embedding, own, tokenizer)} if words else {}
  if isinstance(embedding, DPQEmbedding):
    codes_VM = codes_of_all(embedding, own)
    counts_MK = quantize.code_counts(codes_VM, embedding.quantizer.codes)
    perplexity_M = np.asarray(quantize.code_perplexity(counts_MK), np.float64)
    measured["codes"] = {
      "perplexity": {"mean": float(perplexity_M.mean()), "least": float(perplexity_M.min())},
      "distinct": len(np.unique(codes_VM, axis=0)),
    }
    if words:
      tokens = single_tokens(tokenizer, [word for family in FAMILIES for word in family])
      measured["codes"] |= {
        "counts": np.asarray(counts_MK, int).tolist(),
        "words": {word: codes_VM[token, :CODES].tolist() for word, token in tokens.items()},
      }
    measured["compact"] = compact_size(embedding, own)
    measured["changes"] = code_changes(embedding, folder)
  if isinstance(experiment.model, EncoderDecoder):
    measured["bleu"] = bleu(experiment, load_text(experiment).experiment.model, variables)
  return measured


def _embedding_variables(variables: dict[str, Any]) -> dict[str, Any]:
  """The embedding's variables, which some models hold in their encoder."""
  if "encoder" in variables["params"] and "embedding" not in variables["params"]:
    variables = {name: tree["encoder"] for name, tree in variables.items() if "encoder" in tree}
  return part_of(variables, "embedding")


def compact_size(embedding: DPQEmbedding, variables: dict[str, Any]) -> dict[str, float]:
  """The compression ratio by the paper's formula, bytes in memory and in the file."""
  small = embedding.compact(variables)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "embedding.safetensors")
    small.save(path)
    size = path.stat().st_size
  return {"formula": small.compression_ratio(), "bytes": small.nbytes, "file_bytes": size}


def code_changes(embedding: DPQEmbedding, folder: pathlib.Path) -> list[tuple[int, float]]:
  """Percentage of codes that changed since the checkpoint before, by step."""
  steps = saved_steps(folder)
  codes = [
    codes_of_all(embedding, _embedding_variables(read_run_variables(folder, at=step)[0]))
    for step in steps
  ]
  changed = [100 * float((b != a).mean()) for a, b in itertools.pairwise(codes)]
  return list(zip(steps[1:], changed, strict=True))


def codes_of_all(embedding: DPQEmbedding, variables: dict[str, Any]) -> np.ndarray:
  """The codes of every token, int32 [V, M]."""
  encode = jax.jit(lambda own, tokens: embedding.apply(own, tokens, method="codes_of"))
  return np.asarray(encode(variables, jnp.arange(embedding.vocab)))


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
  measured = {"result": result}
  if isinstance(model, EncoderDecoder):
    measured["bleu"] = bleu(experiment, model, variables)
  return measured


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
