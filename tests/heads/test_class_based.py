"""Does the class-based head keep the contract, whatever classes it has, and score only its own?"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.contract import HeadContract
from vqjax import ClassBasedHead, assign
from vqjax.ops import classes as class_ops


def with_empty_classes(vocab, classes):
  """Only every third class has tokens, and the first has most of them."""
  spread = (np.arange(vocab) * 7 % classes) // 3 * 3
  return np.where(np.arange(vocab) % 2, spread, 0)


class TestClassBasedHead(HeadContract):
  cases: ClassVar = {
    "equal": lambda v, d: ClassBasedHead(v, d, 10),
    "empty": lambda v, d: ClassBasedHead(v, d, 17, with_empty_classes),
    "frequent": lambda v, d: ClassBasedHead(v, d, 13, assign.FrequentAlone()),
    "one class": lambda v, d: ClassBasedHead(v, d, 1),
    "a class each": lambda v, d: ClassBasedHead(v, d, v),
  }
  mesh_cases: ClassVar = ("equal", "empty")

  def reference_logits(self, head, variables, hidden):
    """Class by class."""
    params, table = variables["params"], variables["codes"]["assignment"]
    sizes = np.bincount(table, minlength=head.classes)
    class_scores = np.where(sizes > 0, hidden @ params["class_weight"].T, -np.inf)
    log_prob = hidden @ params["weight"].T
    log_class = reference.log_softmax(class_scores)
    for c in np.flatnonzero(sizes):
      within = reference.log_softmax(log_prob[..., table == c])
      log_prob[..., table == c] = log_class[..., c : c + 1] + within
    return log_prob
