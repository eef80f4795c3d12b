"""Do numbers read with three digits and the right prefix?"""

import pytest

from vqjax.lab.report import units


@pytest.mark.parametrize(
  ("value", "text"),
  [(0, "0"), (999, "999"), (1000, "1.00 k"), (1_570_000, "1.57 M"), (98_304, "98.3 k")],
)
def test_counts_have_decimal_prefixes(value, text):
  assert units.count(value) == text


@pytest.mark.parametrize(
  ("value", "text"),
  [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (6_400_000, "6.10 MiB"), (2**40, "1.00 TiB")],
)
def test_sizes_have_binary_prefixes(value, text):
  assert units.size(value) == text


def test_a_value_that_would_round_up_to_the_next_prefix_takes_it():
  assert units.count(999_999) == "1.00 M"
  assert units.size(2**20 - 1) == "1.00 MiB"


def test_what_is_not_finite_says_so():
  assert units.count(float("nan")) == "nan"
  assert units.fixed(2)(float("inf")) == "inf"


def test_long_names_keep_both_ends():
  short = units.shorten("grouped_head_with_a_very_long_name_seed_3", 15)
  assert short == "grouped…_seed_3"
  assert units.shorten("dense") == "dense"
