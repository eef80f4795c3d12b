"""How does the page of the VQ-Logits tables read?"""

from experiments.vq_paper import PAPER
from experiments.vq_rows import tables

__all__ = ["PAPER", "tables", "write"]


def write(results):
  """Writes nothing yet."""
  return []
