"""Layouts permute axes as their text says, and back."""

import re

import numpy as np
import pytest

from vqjax.lm.sources.families import FAMILIES
from vqjax.lm.sources.layout import Layout


def test_axes_are_split_and_permuted():
  tensor = np.arange(6 * 5).reshape(6, 5)
  found = Layout("(h c) d -> d h c").variable(tensor, (5, 2, 3))
  np.testing.assert_array_equal(found, tensor.reshape(2, 3, 5).transpose(2, 0, 1))


def test_coordinates_that_are_side_by_side_become_halves():
  # A head of width 6 in llama.cpp's order has x0 y0 x1 y1 x2 y2, and here x0 x1 x2 y0 y1 y2.
  tensor = np.array([[0], [10], [1], [11], [2], [12]])
  found = Layout("(h i 2) d -> d h (2 i)").variable(tensor, (1, 1, 6))
  assert found.ravel().tolist() == [0, 1, 2, 10, 11, 12]


LAYOUTS = sorted(
  {
    str(text)
    for family in FAMILIES.values()
    for rule in family.rules
    for text in (rule.layout, rule.gguf_layout)
    if text
  }
)


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_tensor_comes_back(text):
  layout = Layout(text)
  axes = re.findall(r"\([^)]*\)|\S+", text.split(" -> ")[1])
  shape = (3, 2, 5, 6)[-len(axes) :]
  variable = np.random.default_rng(0).normal(size=shape)
  tensor = layout.tensor(variable)
  assert tensor.shape == layout.file_shape(shape)
  np.testing.assert_array_equal(layout.variable(tensor, shape), variable)
