"""Tests of measurements that studies share."""

import numpy as np

from experiments.studies import page
from experiments.studies.measure import single_tokens


class Words:
  """An encoder of a few words."""

  words = ("<eos>", "<unk>", "monday", "toronto", "bush")
  eos = 0

  def encode(self, text):
    tokens = [self.words.index(word) if word in self.words else 1 for word in text.split()]
    return np.array([*tokens, self.eos])

  def decode(self, tokens):
    return " ".join(self.words[token] for token in tokens if token != self.eos)


def test_words_that_are_not_one_token_are_left_out():
  tokens = single_tokens(Words(), ("monday", "friday", "toronto"))
  assert tokens == {"monday": 2, "toronto": 3}


def test_no_point_of_the_frontier_is_beaten_at_a_smaller_x():
  points = [(8.0, 2.0), (1.0, 5.0), (2.0, 6.0), (4.0, 3.0), (4.0, 4.0)]
  assert page.frontier(points) == [(1.0, 5.0), (4.0, 3.0), (8.0, 2.0)]
