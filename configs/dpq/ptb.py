"""DPQ-SX on Penn Treebank: the small LSTM, K = 8, 25 shared subspaces.

The paper's perplexity is 105.8 (Table 4).
"""

from configs.dpq.lstm import SMALL, V, language_model
from vqjax import DPQEmbedding, SoftmaxQuantizer
from vqjax.lab.config import Experiment
from vqjax.lab.data import PennTreebank


def experiment() -> Experiment:
  quantizer = SoftmaxQuantizer(8, 25, shared=True, table_init=SMALL.begin)
  embedding = DPQEmbedding(V, SMALL.dim, quantizer, query_init=SMALL.begin)
  return language_model("dpq-sx", embedding, SMALL, PennTreebank(), 929_589)
