"""Forms of a table of n-grams take the bits that they say, and a smaller step errs less."""

import numpy as np
import pytest

from experiments.studies.ngrams.forms import BITS, forms


@pytest.mark.slow
def test_forms_take_the_bits_that_they_say_and_steps_follow_the_counts():
  rng = np.random.default_rng(0)
  counts = (1e4 / np.arange(1, 8193) ** 1.1).astype(np.uint32)
  table = rng.normal(size=(len(counts), 32)).astype(np.float32)
  weighed = counts * np.where(np.arange(len(counts)) % 2, 1.9, 0.1)
  # What a form costs a text: the squares of the errors of the rows that it reads.
  errors, bits = {}, {}
  for form in forms(table, counts, weighed):
    bits[form.name] = form.bits
    errors[form.name] = (weighed * np.square(form.table - table).sum(-1)).sum() / weighed.sum()
  asked = {name: float(name.split()[-2]) for name in bits if name.endswith("bits")}
  # A header of 3 kB is a fifth of a bit here.
  assert all(abs(bits[name] - asked[name]) < 0.25 for name in asked), bits
  assert bits["int8, a scale a row"] == 8.5
  assert bits["IQ4_NL"] == 4.5
  assert (
    errors["int8, a scale a row"] < errors["int4, a scale a row"] < errors["int2, a scale a row"]
  )
  for size in BITS[::2]:
    assert (
      errors[f"steps by counts and gradients, {size} bits"] < errors[f"steps alike, {size} bits"]
    )
