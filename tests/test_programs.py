"""The number of programs, which the settings of all tests limit, is that of what is compiled."""

import jax
import numpy as np


def test_programs_are_counted_once(programs):
  before, double = programs(), jax.jit(lambda x: 2 * x)
  for _ in range(3):
    double(np.ones(3))
  assert programs() == before + 1
