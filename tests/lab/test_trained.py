"""Commands that generate and score read pretrained models and run folders."""

import json
import pathlib
import shutil

import pytest

from vqjax.commands import generate, score, train
from vqjax.commands.models import load_model
from vqjax.lab.run_files import read_config
from vqjax.lm import records

CONFIG = """
import pathlib
from tests import tiny
from vqjax import DenseHead
from vqjax.lab.config import FROM_TOKENIZER

def experiment():
  return tiny.experiment(pathlib.Path({text!r}), DenseHead(FROM_TOKENIZER, 16))
"""

STUDY = """
def study():
  from vqjax.lab.study import Study

  return Study(experiment(), {"tiny": {"train.learning_rate": 1.0}})
"""


@pytest.fixture
def run(finished, tmp_path):
  """A trained run: its folder, its config file and its folder of text."""
  experiment, folder, _ = finished
  config = tmp_path / "config.py"
  config.write_text(CONFIG.format(text=experiment.data.path))
  return folder, config, pathlib.Path(experiment.data.path)


def test_a_run_generates_and_scores_its_text(run, capsys):
  folder, config, text = run
  given = [str(folder), "--config", str(config)]
  assert generate.main([*given, "--prompt", "w0 w7", "--max-tokens", "4"]) == 0
  assert capsys.readouterr().out.startswith("w0 w7")
  assert score.main([*given, "--text", str(text / "00.txt"), "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  size = len((text / "00.txt").read_bytes())
  assert found["bytes"] == size
  nats = found["nats_per_token"] * found["tokens"]
  assert nats == pytest.approx(found["nats_per_byte"] * size)
  assert 0 < found["nats_per_token"] < 4.2  # below log 61, the uniform distribution


def test_documents_of_a_file_are_scored_each_by_itself(run, tmp_path, capsys):
  folder, config, _ = run
  file, documents = tmp_path / "some.txt", ("w0 w7 w3", "w1 w2")

  def scored(text, *more):
    file.write_text(text)
    given = [str(folder), "--config", str(config), "--text", str(file), "--json", *more]
    assert score.main(given) == 0
    return json.loads(capsys.readouterr().out)

  alone = [scored(document) for document in documents]
  found = scored(" | ".join([*documents, ""]), "--separator", "|")
  assert (found["documents"], found["tokens"]) == (2, sum(one["tokens"] for one in alone))
  nats = sum(one["nats_per_token"] * one["tokens"] for one in alone)
  # Sums of a handful of float32 numbers.
  assert found["nats_per_token"] * found["tokens"] == pytest.approx(nats, rel=1e-6)
  assert found["bytes"] == sum(one["bytes"] for one in alone)


def test_a_run_knows_the_file_that_it_was_made_from(run, tmp_path, monkeypatch):
  folder, config, text = run
  kept, copy = read_config(folder), tmp_path / "copy"
  shutil.copytree(folder, copy)
  study = tmp_path / "study.py"
  study.write_text(CONFIG.format(text=str(text)) + STUDY)
  row = {"identity": "", "fields": {"train.learning_rate": 1e-2}}
  of_study = {"row": "tiny", "seed": 0, "scale": "1", "runs": {"tiny": row}}
  moved = study.rename(tmp_path / "moved.py")
  for source, given in (
    ({"config": str(config), "overrides": ["name=tiny"]}, None),
    ({"study": str(moved), **of_study}, None),
    ({"study": str(study), **of_study}, str(moved)),
  ):
    records.write(copy / "config.json", kept | {"source": source})
    assert load_model(str(copy), given).model == load_model(str(folder), str(config)).model
  given = {}
  monkeypatch.setattr(train, "fit", lambda experiment, folder, source: given.update(source) or {})
  monkeypatch.setattr(train, "print_result", lambda result, folder: None)
  assert train.main([str(config), "train.steps=7", "--separator", "|"]) == 0
  assert given == {"config": str(config), "overrides": ["train.steps=7", "data.separator=|"]}


def test_a_run_without_its_config_or_with_another_is_refused(run, capsys):
  folder, config, _ = run
  assert generate.main([str(folder), "--prompt", "w0"]) == 2
  assert "--config" in capsys.readouterr().err
  other = [str(folder), "--config", str(config), "model.layers=2", "--prompt", "w0"]
  assert generate.main(other) == 2
  assert "layers" in capsys.readouterr().err


def test_wrong_arguments_for_a_pretrained_model_are_refused(real_data, capsys):
  given = [str(real_data / "stories260K" / "stories260K.bin"), "--prompt", "a"]
  for wrong, part in ((["model.layers=2"], "--config"), (["--seed", str(2**70)], "--seed")):
    assert generate.main([*given, *wrong]) == 2
    assert part in capsys.readouterr().err


def test_stories260k_continues_its_published_story_and_scores_it(real_data, tmp_path, capsys):
  model = str(real_data / "stories260K" / "stories260K.bin")
  published = (real_data / "stories260K" / "stories260K.md").read_text()
  story = published[published.index("Once upon") :][:400]
  prompt, rest = story[:17], story[17:]
  settings = ["--max-tokens", "180", "--temperature", "0", "--json"]
  assert generate.main([model, "--prompt", prompt, *settings]) == 0
  (continued,) = json.loads(capsys.readouterr().out)["continuations"]
  assert continued["text"].startswith(rest)
  file = pathlib.Path(tmp_path, "story.txt")
  file.write_text(prompt + continued["text"])
  assert score.main([model, "--text", str(file), "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  # All but the tokens of the prompt are the ones that were generated.
  nats = -sum(continued["log_probs"])
  assert nats < found["nats_per_token"] * found["tokens"] < nats + 30


@pytest.mark.slow
def test_a_draft_model_leaves_the_greedy_text_as_it_is(real_data, capsys):
  model = str(real_data / "stories260K" / "stories260K.bin")
  given = [model, "--prompt", "Once upon a time", "--max-tokens", "32", "--temperature", "0"]
  texts = []
  for more in ([], ["--draft", model, "--draft-length", "3"]):
    assert generate.main([*given, *more, "--json"]) == 0
    texts.append(json.loads(capsys.readouterr().out)["continuations"][0]["text"])
  assert texts[0] == texts[1]
