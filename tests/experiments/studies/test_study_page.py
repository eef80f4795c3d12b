"""Tests of the kept results of all studies, and of the blocks of their pages."""

import pytest

from experiments.studies import study_page
from experiments.studies.comparison import page as comparison
from experiments.studies.dpq import page as dpq
from experiments.studies.grouped import page as grouped
from experiments.studies.ngrams import page as ngrams
from experiments.studies.vq_logits import page as vq_logits
from experiments.studies.words import single_tokens
from tests.fakes import FewWords


@pytest.mark.parametrize("page", [comparison, dpq, grouped, ngrams, vq_logits])
def test_every_kept_result_is_of_the_configuration_that_the_code_has(page):
  """A code move must not change the identity of a result."""
  works = page.works()
  kept = {name: work.results.read() for name, work in works.items()}
  assert any(kept.values())
  assert {name: results for name, (_, results) in study_page.current(works).items()} == kept


PAGE = """# Title

Prose.

<!-- generated: one -->
stale
<!-- end: one -->

More prose.

<!-- generated: two -->
<!-- end: two -->
"""


def test_only_the_generated_blocks_of_a_page_are_rewritten(tmp_path):
  path = tmp_path / "page.md"
  path.write_text(PAGE)
  blocks = {"one": "first \\1", "two": "second\n"}
  assert study_page.update_page(path, blocks)
  rewritten = path.read_text()
  assert not study_page.update_page(path, blocks)
  assert path.read_text() == rewritten
  outside = lambda text: [part.split("-->\n")[-1] for part in text.split("<!-- generated")]
  assert outside(rewritten) == outside(PAGE)
  assert "\nfirst \\1\n" in rewritten
  assert "stale" not in rewritten


@pytest.mark.parametrize("names", [("one",), ("one", "two", "three")])
def test_markers_and_blocks_must_match(tmp_path, names):
  path = tmp_path / "page.md"
  path.write_text(PAGE)
  with pytest.raises(ValueError, match="`page`"):
    study_page.update_page(path, dict.fromkeys(names, ""))
  assert path.read_text() == PAGE


def test_words_that_are_not_one_token_are_left_out():
  tokens = single_tokens(FewWords("monday", "toronto", "bush"), ("monday", "friday", "toronto"))
  assert tokens == {"monday": 2, "toronto": 3}


def test_no_point_of_the_frontier_is_beaten_at_a_smaller_x():
  points = [(8.0, 2.0), (1.0, 5.0), (2.0, 6.0), (4.0, 3.0), (4.0, 4.0)]
  assert study_page.frontier(points) == [(1.0, 5.0), (4.0, 3.0), (8.0, 2.0)]
