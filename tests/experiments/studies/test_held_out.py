"""Tests of measurements that studies share."""

from experiments.studies import study_page
from experiments.studies.held_out import single_tokens
from tests.fakes import FewWords

WORDS = FewWords("monday", "toronto", "bush")


def test_words_that_are_not_one_token_are_left_out():
  tokens = single_tokens(WORDS, ("monday", "friday", "toronto"))
  assert tokens == {"monday": 2, "toronto": 3}


def test_no_point_of_the_frontier_is_beaten_at_a_smaller_x():
  points = [(8.0, 2.0), (1.0, 5.0), (2.0, 6.0), (4.0, 3.0), (4.0, 4.0)]
  assert study_page.frontier(points) == [(1.0, 5.0), (4.0, 3.0), (8.0, 2.0)]
