"""The command prints the perplexity floors of a config, and refuses a wrong call."""

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

from vqjax import CodebookHead, assign, convert
from vqjax.commands import floor
from vqjax.embeddings.codebook import CodebookEmbedding
from vqjax.lab import starting_points
from vqjax.lab.config import load_config, override
from vqjax.lab.training.run_folder import load_text

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
MIN_COUNT = "tokenizer.min_count=20"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """A folder of text whose words have a token each."""
  folder = tmp_path_factory.mktemp("text")
  rng = np.random.default_rng(0)
  for split, words in (("train", 9000), ("valid", 700), ("test", 300)):
    drawn = [f"[w{n:.0f}]" for n in np.minimum(rng.pareto(1, words) * 4, 60)]
    (folder / f"{split}.txt").write_text(" ".join(drawn))
  return folder


@pytest.fixture
def measured(corpus, tmp_path, capsys):
  """Calls the command with --json: the numbers in the file and what was printed."""

  def call(config, codes, *overrides):
    file = tmp_path / "new" / "floor.json"
    fields = [f"data.path={corpus}", MIN_COUNT, f"model.head.codes={codes}", *overrides]
    code = floor.main([str(CONFIGS / config), *fields, "--json", str(file)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(file.read_text()), printed.out

  return call


def test_the_floors_equal_entropies_within_codes(measured, corpus):
  floors, _ = measured("lm_codebook.py", 13)
  experiment = override(load_config(CONFIGS / "lm_codebook.py"), [f"data.path={corpus}", MIN_COUNT])
  text = load_text(experiment)
  vocab = text.experiment.model.head.vocab
  assert (floors["vocab"], floors["codes"], floors["token_bias"]) == (vocab, 13, False)
  assignment = assign.FrequentAlone()(vocab, 13)
  for name, split in text.splits.items():
    counts = np.bincount(split.tokens, minlength=vocab)
    row = floors["splits"][name]
    assert row["tokens"] == counts.sum()
    size = np.bincount(assignment)[assignment]
    assert row["uniform"]["nats"] == pytest.approx(np.average(np.log(size), weights=counts))
    assert row["uniform"]["perplexity"] == pytest.approx(math.exp(row["uniform"]["nats"]))
    assert 0 < row["token_bias"]["nats"] < row["uniform"]["nats"]
  assert floors["sizes"]["least"] == 1
  assert floors["sizes"]["most"] == np.bincount(assignment).max()
  assert floors["dead"] == 0
  for row in floors["worst"]:
    assert row["nats"] == pytest.approx(row["count"] * math.log(row["shared"]))


def test_printed_tables_show_the_words_of_the_text(measured):
  floors, printed = measured("lm_codebook.py", 13)
  assert f"V = {floors['vocab']}, K = 13;" in printed
  assert f"{floors['splits']['test']['uniform']['perplexity']:.2f}" in printed
  assert repr(floors["worst"][0]["text"]) in printed


def test_the_worst_tokens_of_a_head_with_a_bias_include_the_bias(measured):
  floors, _ = measured("lm_codebook_bias.py", 13)
  assert floors["token_bias"]
  total = floors["splits"]["train"]["tokens"] * floors["splits"]["train"]["token_bias"]["nats"]
  assert 0 < sum(row["nats"] for row in floors["worst"]) <= total * (1 + 1e-9)


def test_codes_for_all_tokens_have_a_floor_of_one(measured):
  vocab = measured("lm_codebook.py", 13)[0]["vocab"]
  floors, _ = measured("lm_codebook.py", vocab, "model.head.assignment_init.fraction=0")
  assert floors["splits"]["test"]["uniform"]["perplexity"] == 1
  assert floors["worst"] == []


def test_a_tied_head_has_the_codes_of_its_embedding(corpus):
  untied = override(load_config(CONFIGS / "lm_codebook.py"), [f"data.path={corpus}", MIN_COUNT])
  vocab, dim = untied.model.head.vocab, untied.model.head.dim
  embedding = CodebookEmbedding(vocab, dim, 13, assign.Random(5))
  head = CodebookHead(vocab, dim, 13, embedding=embedding)
  model = untied.model.clone(embedding=embedding, head=head)
  floors = floor.measured_floors(dataclasses.replace(untied, model=model))
  tokens = load_text(untied).splits["test"].tokens
  counts = np.bincount(tokens, minlength=floors["vocab"])
  expected = assign.floor(assign.Random(5)(floors["vocab"], 13), counts).nats
  assert floors["splits"]["test"]["uniform"]["nats"] == pytest.approx(expected)


def test_the_assignment_of_init_from_has_its_floor(corpus):
  plain = override(load_config(CONFIGS / "lm_codebook.py"), [f"data.path={corpus}", MIN_COUNT])
  plain = override(plain, ["model.head.codes=13", "model.layers=1"])
  floors = floor.measured_floors(
    dataclasses.replace(plain, init_from=starting_points.Mapped(convert.FrequencyBins()))
  )
  counts = {
    name: np.bincount(split.tokens, minlength=floors["vocab"])
    for name, split in load_text(plain).splits.items()
  }
  expected = assign.floor(assign.equal_count(counts["train"], 13), counts["test"]).nats
  assert floors["splits"]["test"]["uniform"]["nats"] == pytest.approx(expected)
  assert expected != pytest.approx(
    floor.measured_floors(plain)["splits"]["test"]["uniform"]["nats"]
  )


@pytest.mark.parametrize(
  ("config", "overrides", "names"),
  [
    ("lm_dense.py", [], ("model.head", "DenseHead")),
    ("lm_codebook.py", ["model.head.codes=9999"], ("codes", "9999")),
    ("lm_codebook.py", ["data.path=nowhere"], ("data.path", "nowhere")),
    ("lm_none.py", [], ("config", "lm_none.py")),
  ],
)
def test_a_wrong_call_names_the_argument_and_its_value(corpus, capsys, config, overrides, names):
  assert floor.main([str(CONFIGS / config), f"data.path={corpus}", *overrides]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ")
  assert all(name in error for name in names)
