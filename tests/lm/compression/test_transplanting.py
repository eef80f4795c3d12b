"""A model with the tokenizer of another has the rows of shared pieces, and means of others."""

import json

import numpy as np
import pytest

from tests.lm.compression.test_growing import pieces
from tests.lm.compression.test_trimming import saved, text, trained
from vqjax.cli import main
from vqjax.lm import checkpoints
from vqjax.lm.compression.transplanting import match, transplant

LINE = "on thecat  and the naïve 東京 house\n"


@pytest.mark.parametrize(
  "kinds", [("byte-level", "pieces"), ("pieces", "fallback"), ("fallback", "byte-level")]
)
def test_matched_tokens_spell_the_same_text(kinds, tmp_path):
  old, new = (pieces() if kind == "pieces" else trained(kind, tmp_path) for kind in kinds)
  source, parts = match(old, new, old.vocab, new.vocab)
  source = source.tolist()
  spelled = [token for n in new.encode(LINE) for token in parts.get(n, [source[n]])]
  assert old.decode(spelled).strip() == new.decode(new.encode(LINE)).strip() == LINE.strip()
  same = {old.piece(old.eos[0]), new.piece(new.eos[0])}
  assert old.piece(source[new.eos[0]]) in same
  # A part of a character is spelled by bytes.
  control = "<extra>", "<unk>", "<s>", "</s>"
  assert not [n for n, own in parts.items() if not own and new.piece(n) not in control]


@pytest.mark.slow
def test_a_model_gets_the_tokenizer_of_another(tmp_path, capsys):
  old, new = trained("byte-level", tmp_path), pieces()
  _, variables = saved(old, tmp_path / "model", tie_word_embeddings=True)
  saved(new, tmp_path / "other")
  (tmp_path / "text.txt").write_text(text())
  places = [str(tmp_path / "model"), "--out", str(tmp_path / "out")]
  given = ["--tokenizer", str(tmp_path / "other"), "--text", str(tmp_path / "text.txt")]
  assert main(["grow", *places, *given, "--scored", "400"]) == 0
  assert "without old tokens    2, such as '<unk>', '<s>'" in capsys.readouterr().out
  made, more, written = checkpoints.load(tmp_path / "out")
  assert written.encode(LINE) == new.encode(LINE)
  assert made.head.vocab == new.vocab
  report = json.loads((tmp_path / "out" / "growing.json").read_text())
  before, after = (v["params"]["embedding"]["weight"] for v in (variables, more))
  a, unknown = new.encode("a", special=False)[-1], report["ids"]["<unk>"]
  np.testing.assert_array_equal(after[a], before[old.encode("a")[0]])
  np.testing.assert_allclose(after[unknown], np.mean(before, axis=0), atol=1e-6)
  assert report["copied"] + len(report["ids"]) == new.vocab
  assert report["nats_per_byte"] > 0 < report["nats_per_byte_after"]
  with pytest.raises(SystemExit):
    main(["grow", *places, *given, "--multiple", "8"])


@pytest.mark.programs(30)  # the variables of a model of this size, which other tests have too
def test_nothing_changes_with_the_own_tokenizer(tmp_path):
  model, variables = saved(trained("byte-level", tmp_path), tmp_path / "model")
  path = tmp_path / "model"
  report = transplant(path, tmp_path / "out", path)
  after = checkpoints.load(tmp_path / "out").variables["params"]
  for part in ("embedding", "head"):
    np.testing.assert_array_equal(after[part]["weight"], variables["params"][part]["weight"])
  assert report.copied == model.head.vocab
  assert report.nats_per_byte is None
