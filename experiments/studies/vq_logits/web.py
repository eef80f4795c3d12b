"""VQ-Logits on long lines of WikiText-2 in SentencePiece's pieces, for the paper's C4.

vqjax study experiments/studies/vq_logits/web.py --out experiments/studies/vq_logits/web
"""

from configs.vq_logits import c4
from experiments.studies.vq_logits.rows import floors, main_rows, paper_tuning, small, small_tuning
from vqjax.lab.data import Filtered, SentencePieceTokenizer, WikiText
from vqjax.lab.study import Study

CODES = 512, 1024, 2048


def study() -> Study:
  """The study of the small decoder."""
  base = small(Filtered(WikiText(), min_chars=512), SentencePieceTokenizer(vocab=8000), steps=600)
  rows = main_rows(base, small_tuning(base, 200), CODES, cutoffs=(500, 2000), rank=16)
  return Study(base, rows, seeds=1, reference="full", measure=floors)


def paper() -> Study:
  """The study of the paper's decoder."""
  base = c4.experiment()
  rows = main_rows(base, paper_tuning(base), CODES, cutoffs=(2400, 9600), rank=48)
  return Study(base, rows, seeds=1, reference="full", measure=floors)
