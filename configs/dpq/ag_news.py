"""DPQ-SX on AG News: topics by the mean of a text's embeddings."""

from configs.dpq.text import BEGIN, DIM, V, classifier
from experiments.studies.dpq.data.labelled import AGNews
from vqjax import DPQEmbedding, SoftmaxQuantizer
from vqjax.lab.config import Experiment


def experiment() -> Experiment:
  quantizer = SoftmaxQuantizer(32, 50, table_init=BEGIN)
  embedding = DPQEmbedding(V, DIM, quantizer, query_init=BEGIN)
  return classifier("dpq-sx", embedding, AGNews(), 4)
