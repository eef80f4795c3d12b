"""Generation and scoring of text with the general decoder and any head."""

from vqjax.lm.generation.decoding import Generated, generate, stream
from vqjax.lm.generation.draft_trees import DraftTree
from vqjax.lm.generation.kv_cache import unstacked
from vqjax.lm.generation.sampling import GREEDY, UNFILTERED, Sampling
from vqjax.lm.generation.scoring import score
from vqjax.lm.generation.speculation import Draft, Drafter, EarlyExit, RoundTimes
from vqjax.lm.generation.text_stream import TextStream
from vqjax.lm.generation.tree_drafting import TreeDraft, Typical

__all__ = [
  "GREEDY",
  "UNFILTERED",
  "Draft",
  "DraftTree",
  "Drafter",
  "EarlyExit",
  "Generated",
  "RoundTimes",
  "Sampling",
  "TextStream",
  "TreeDraft",
  "Typical",
  "generate",
  "score",
  "stream",
  "unstacked",
]
