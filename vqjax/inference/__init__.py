"""Generation and scoring of text with the general decoder and any head."""

from vqjax.inference.cache import unstacked
from vqjax.inference.eagle import Eagle, load_eagle, save_eagle
from vqjax.inference.generation import Generated, generate, stream
from vqjax.inference.lens import (
  Lens,
  least_squares_lens,
  lens_divergence,
  lens_readings,
  load_lens,
  residual_streams,
  save_lens,
)
from vqjax.inference.medusa import (
  Medusa,
  MedusaBlocks,
  load_drafter,
  load_medusa,
  medusa_loss,
  medusa_ranks,
  save_medusa,
)
from vqjax.inference.sampling import GREEDY, UNFILTERED, Sampling
from vqjax.inference.scoring import score
from vqjax.inference.speculation import Draft, Drafter, EarlyExit, RoundTimes
from vqjax.inference.text import TextStream, Tokenizer
from vqjax.inference.tree_drafting import TreeDraft, Typical
from vqjax.inference.trees import Tree
from vqjax.ops.lens import Readings

__all__ = [
  "GREEDY",
  "UNFILTERED",
  "Draft",
  "Drafter",
  "Eagle",
  "EarlyExit",
  "Generated",
  "Lens",
  "Medusa",
  "MedusaBlocks",
  "Readings",
  "RoundTimes",
  "Sampling",
  "TextStream",
  "Tokenizer",
  "Tree",
  "TreeDraft",
  "Typical",
  "generate",
  "least_squares_lens",
  "lens_divergence",
  "lens_readings",
  "load_drafter",
  "load_eagle",
  "load_lens",
  "load_medusa",
  "medusa_loss",
  "medusa_ranks",
  "residual_streams",
  "save_eagle",
  "save_lens",
  "save_medusa",
  "score",
  "stream",
  "unstacked",
]
