"""Tensors of drafters mean here what they mean to the libraries that run them."""

import jax
import numpy as np
import pytest

from tests.jitted import results
from vqjax import DenseHead, RoutedHead
from vqjax.lm.drafting import layouts

V, D, C, BUDGET = 96, 16, 8, 3


@pytest.fixture(scope="module")
def made():
  head, rng = DenseHead(V, D), np.random.default_rng(0)
  variables = {"params": {"weight": rng.standard_normal((V, D), np.float32)}}
  order = rng.permutation(V)
  given = results(lambda v: RoutedHead.from_dense(head, v, order, C, BUDGET)[1], variables)
  given["params"]["centroids"] = rng.standard_normal((C, D), np.float32)
  return head, variables, RoutedHead(V, D, clusters=C, budget=BUDGET), given


@pytest.mark.programs(30)  # `routed_head` computes the centroids once, operation by operation
def test_routed_tensors_come_back(made):
  head, variables, own, given = made
  tensors = layouts.routed_tensors(own, given)
  again, read = layouts.routed_head(head, variables, tensors, BUDGET)
  assert (again.clusters, again.budget) == (C, BUDGET)
  jax.tree.map(np.testing.assert_array_equal, read, given)


def test_transformers_scores_the_same_rows(made):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  name = "transformers.models.gemma4_assistant.modeling_gemma4_assistant"
  modeling = pytest.importorskip(name)
  _, variables, own, given = made
  config = transformers.Gemma4AssistantConfig(
    text_config=transformers.Gemma4TextConfig(
      vocab_size=V, hidden_size=D, num_hidden_layers=1, num_kv_shared_layers=1,
      hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
    ),
    num_centroids=C, centroid_intermediate_top_k=BUDGET, use_ordered_embeddings=True,
  )  # fmt: skip
  theirs = modeling.Gemma4AssistantMaskedEmbedder(config)
  prefix = "masked_embedding."
  state = {
    key.removeprefix(prefix): torch.tensor(np.array(value))
    for key, value in layouts.routed_tensors(own, given).items()
  }
  theirs.load_state_dict(state)
  assert {key: (x.shape, x.dtype) for key, x in theirs.state_dict().items()} == {
    key: (x.shape, x.dtype) for key, x in state.items()
  }
  hidden = np.random.default_rng(2).standard_normal((2, 5, D), np.float32)
  weight = torch.tensor(np.array(variables["params"]["weight"]))
  with torch.no_grad():
    expected = theirs(torch.tensor(hidden), weight).numpy()
  ours = results(own.apply, given, hidden)
  # Theirs gives all rows of other clusters one score below the least, ours the centroid's.
  scored = expected > expected.min(axis=-1, keepdims=True)
  assert scored.sum(axis=-1).tolist() == [[BUDGET * V // C] * 5] * 2
  np.testing.assert_allclose(ours[scored], expected[scored], atol=1e-5)


def test_bad_routed_tensors_are_refused(made):
  head, variables, own, given = made
  tensors = layouts.routed_tensors(own, given)
  with pytest.raises(ValueError, match=r"lacks masked_embedding\.token_ordering"):
    layouts.routed_head(head, variables, {layouts.CENTROIDS: tensors[layouts.CENTROIDS]})
  with pytest.raises(ValueError, match=r"must have shape \[C, 16\]; got \[8, 9\]"):
    layouts.routed_head(head, variables, tensors | {layouts.CENTROIDS: np.zeros((8, 9))})
  with pytest.raises(ValueError, match=r"must divide the vocabulary, 96, .* got 7"):
    layouts.routed_head(head, variables, tensors | {layouts.CENTROIDS: np.zeros((7, D))})
  with pytest.raises(ValueError, match=r"must be finite"):
    layouts.routed_head(head, variables, tensors | {layouts.CENTROIDS: np.full((C, D), np.nan)})
  with pytest.raises(ValueError, match="neither a bias nor a cap"):
    layouts.routed_tensors(RoutedHead(V, D, clusters=C, budget=1, use_bias=True), given)
