"""Forms of a table of n-grams take the bits that they say, and a smaller step errs less."""

import numpy as np
import pytest

from experiments import ngrams


@pytest.mark.slow
def test_forms_take_the_bits_that_they_say_and_steps_follow_the_counts():
  rng = np.random.default_rng(0)
  counts = (1e4 / np.arange(1, 4097) ** 1.1).astype(np.uint32)
  table = rng.normal(size=(len(counts), ngrams.WIDTH)).astype(np.float32)
  # What a form costs a text: the squares of the errors of the rows that it reads.
  errors, bits = {}, {}
  for form in ngrams.forms(table, counts):
    bits[form.name] = form.bits
    errors[form.name] = (counts * np.square(form.table - table).sum(-1)).sum() / counts.sum()
  asked = {name: float(name.split()[-2]) for name in bits if name.endswith("bits")}
  # A header of 3 kB is a fifth of a bit here.
  assert all(abs(bits[name] - asked[name]) < 0.25 for name in asked), bits
  assert bits["int8, a scale a row"] == 8.5
  assert bits["IQ4_NL"] == 4.5
  assert (
    errors["int8, a scale a row"] < errors["int4, a scale a row"] < errors["int2, a scale a row"]
  )
  for size in ngrams.BITS[:3]:
    assert errors[f"steps by counts, {size} bits"] < errors[f"one step, {size} bits"]
