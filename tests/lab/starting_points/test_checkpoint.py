"""Runs that begin with a pretrained model, and train its tokens."""

import json

import jax
import numpy as np
import pytest

from tests import tiny
from tests.lm.checkpoints.families import random_variables
from vqjax import CodebookHead
from vqjax.commands import inspect
from vqjax.convert import KMeans, ToCodebook
from vqjax.lab.config import Experiment, Train, config_hash
from vqjax.lab.data import CheckpointTokenizer, Text, Windows, encode_document, fingerprint
from vqjax.lab.starting_points import Checkpoint
from vqjax.lab.training import fit
from vqjax.lm import checkpoints
from vqjax.lm.sources.families import decoder_of
from vqjax.sharding import MeshShape

tokenizers = pytest.importorskip("tokenizers", reason="the extra `lab` is not installed")

V = 128


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
  """A folder with a small Llama of 128 rows and a tokenizer of 70 words."""
  folder = tmp_path_factory.mktemp("pretrained") / "model"
  config = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
  }
  model = decoder_of(config)
  variables = jax.device_get(random_variables(model))
  checkpoints.save(folder, model, variables)
  names = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(67))]
  words = tokenizers.models.WordLevel({n: at for at, n in enumerate(names)}, unk_token="<unk>")
  made = tokenizers.Tokenizer(words)
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.save(str(folder / "tokenizer.json"))
  file = folder / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 2}))
  return folder, variables


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  return str(tiny.write_text(tmp_path_factory.mktemp("words") / "text"))


def experiment(folder, text, head=None, target=None):
  return Experiment(
    name="pretrained",
    model=checkpoints.decoder(folder, head=head, context=8),
    data=Text(text, valid_fraction=0.2, test_fraction=0.2),
    tokenizer=CheckpointTokenizer(str(folder)),
    loader=Windows(),
    train=Train(steps=3, batch=4, warmup=1, eval_every=3, save_every=3, mesh=MeshShape(data=1)),
    init_from=Checkpoint(str(folder), target),
  )


@pytest.mark.slow
def test_a_run_begins_with_the_pretrained_body_and_the_codes_of_its_rows(pretrained, text):
  folder, variables = pretrained
  made = experiment(folder, text, CodebookHead(V, 16, 11), ToCodebook(KMeans()))
  _, started, _ = tiny.begun(made)
  jax.tree.map(
    np.testing.assert_array_equal, started["params"]["blocks"], variables["params"]["blocks"]
  )
  code, codebook = started["codes"]["head"]["assignment"], started["params"]["head"]["codebook"]
  rows = np.asarray(variables["params"]["embedding"]["weight"])
  # Codes that ignored the rows would leave 1 - 11/128 of their variance.
  error = ((rows - np.asarray(codebook)[np.asarray(code)]) ** 2).sum()
  assert error < 0.85 * ((rows - rows.mean(0)) ** 2).sum()


@pytest.mark.slow
def test_a_pretrained_model_is_trained_on(pretrained, text, tmp_path):
  made = experiment(pretrained[0], text)
  result = fit(made, tmp_path / "run")
  assert np.isfinite(result["valid"]["nats_per_token"])
  assert config_hash(made) == config_hash(experiment(pretrained[0], text))


def test_documents_begin_and_end_as_the_model_knows_them(pretrained, tmp_path):
  folder = tmp_path / "my.model"  # a folder of any name
  folder.symlink_to(pretrained[0], target_is_directory=True)
  tokenizer = CheckpointTokenizer(str(folder)).fit(lambda: [])
  assert encode_document(tokenizer, "w0 w66 other").tolist() == [3, 69, 0, 2]
  assert (tokenizer.vocab, tokenizer.eos) == (V, (2,))
  again = CheckpointTokenizer("elsewhere").load(tokenizer.state())
  assert fingerprint(again) == fingerprint(tokenizer)


def test_another_vocabulary_is_refused(pretrained, text):
  model = checkpoints.decoder(pretrained[0], head=CodebookHead(64, 16, 11))
  with pytest.raises(ValueError, match=r"`model.head` must have the 128 tokens .* got 64"):
    Checkpoint(str(pretrained[0]))(None, model, {})


def test_the_command_prints_the_share_of_the_vocabulary_table(pretrained, capsys):
  folder, variables = pretrained
  assert inspect.main([str(folder), "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  size = sum(x.size for x in jax.tree.leaves(variables))
  assert found["params"] == size
  assert found["vocabulary_share"] == V * 16 / size
  assert inspect.main([str(folder)]) == 0
  assert "tied to the embedding" in capsys.readouterr().out
  assert inspect.main([str(folder / "absent")]) == 2
