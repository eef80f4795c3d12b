"""A grown model has rows for its new tokens, and computes for the others what it did."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests.jitted import apply
from tests.lm.checkpoints.families import random_variables, small
from tests.lm.compression.test_trimming import saved, text, trained
from vqjax import (
  CodebookEmbedding,
  CodebookHead,
  GroupedHead,
  Int8Embedding,
  LowRankHead,
  ProductHead,
)
from vqjax.cli import main
from vqjax.lm import checkpoints
from vqjax.lm.compression import growing
from vqjax.lm.tokenizers import from_pieces

NEW = ["thecat", " the house", "zyzzyva"]


def pieces():
  """A SentencePiece model of letters and bytes."""
  letters = ["\u2581", *"thecasondmgrufzyvl"]
  bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
  names = ["<unk>", "<s>", "</s>", *bytes_, *letters]
  types = [2, 3, 3, *[6] * 256, *[1] * len(letters)]
  scores = [0.0] * len(names)
  return from_pieces(names, scores, types, bos=1, eos=[2], add_space=True, add_bos=True)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["byte-level", "pieces"])
def test_new_tokens_are_found_and_have_the_mean_of_their_parts(kind, tied, tmp_path):
  tokenizer = pieces() if kind == "pieces" else trained(kind, tmp_path)
  model, variables = saved(tokenizer, tmp_path / "model", tie_word_embeddings=tied)
  report = growing.grow(tmp_path / "model", tmp_path / "out", NEW, texts=[text()], multiple=8)
  grown, more, written = checkpoints.load(tmp_path / "out")
  assert grown.head.vocab == report.vocab_after
  assert report.vocab_after % 8 == 0
  ids = [report.ids[token] for token in NEW]
  assert ids == [tokenizer.vocab + n for n in range(3)]
  line = "on thecat and the house"
  found = written.encode(line)
  assert {ids[0], ids[1]} <= {*found}
  assert written.decode(found) == line
  assert written.encode("a mat") == tokenizer.encode("a mat")
  for layer in ("embedding",) if tied else ("embedding", "head"):
    before = np.asarray(variables["params"][layer]["weight"])
    after = np.asarray(more["params"][layer]["weight"])
    np.testing.assert_array_equal(after[: len(before)], before)
    parts = tokenizer.encode(NEW[0], special=False)
    np.testing.assert_allclose(after[ids[0]], before[parts].mean(axis=0), atol=1e-6)
  assert (grown.head.embedding is not None) == tied
  tokens = jnp.asarray([tokenizer.encode("the old dog")])
  old, new = apply(model, variables, tokens), apply(grown, more, tokens)
  np.testing.assert_allclose(new[..., : old.shape[-1]], old, atol=1e-5)
  assert report.tokens_after <= report.tokens
  # More tokens share the probability, and a text has other tokens.
  assert report.nats_per_byte > 0 < report.nats_per_byte_after


def test_rows_of_padding_are_used_first(tmp_path):
  tokenizer = trained("byte-level", tmp_path)
  model, variables = small("llama", vocab_size=tokenizer.vocab + 5)
  checkpoints.save(tmp_path / "model", model, variables, tokenizer)
  report = growing.grow(tmp_path / "model", tmp_path / "out", NEW)
  assert report.vocab_after == report.vocab == tokenizer.vocab + 5
  after = checkpoints.load(tmp_path / "out").variables["params"]["head"]["weight"]
  before = np.asarray(variables["params"]["head"]["weight"])
  changed = np.flatnonzero((np.asarray(after) != before).any(axis=1))
  assert changed.tolist() == [*report.ids.values()]
  assert report.nats_per_byte is None


ROWS = {
  "mean_of_all": checkpoints.mean_of_all,
  "mean_of_parts_at_length": checkpoints.mean_of_parts_at_length,
  "sampled": checkpoints.sampled(seed=3, scale=0.25),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_what_they_say(name):
  model, variables = small("llama")
  table = np.asarray(variables["params"]["head"]["weight"])
  source, new = np.append(np.arange(97), [5] * 400), {n: [5, 6] for n in range(97, 497)}
  _, more = checkpoints.resize(model, variables, source, new, ROWS[name])
  made = more["params"]["head"]["weight"][97:]
  if name == "sampled":
    # 400 draws: means and variances are within 5 of their standard errors.
    error = 0.5 * table.std(axis=0) / 20
    assert (np.abs(made.mean(axis=0) - table.mean(axis=0)) < 5 * error).all()
    np.testing.assert_allclose(made.std(axis=0), 0.5 * table.std(axis=0), rtol=0.2)
  elif name == "mean_of_all":
    np.testing.assert_allclose(made, np.tile(table.mean(axis=0), (400, 1)), atol=1e-6)
  else:
    lengths = np.linalg.norm(table[[5, 6]], axis=1)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), lengths.mean(), rtol=1e-5)


@pytest.mark.parametrize(
  "head",
  [
    CodebookHead(97, 32, codes=11, token_bias=True),
    ProductHead(97, 32, codes=16, subspaces=4),
    LowRankHead(97, 32, rank=5),
  ],
  ids=lambda head: type(head).__name__,
)
def test_tokens_of_other_heads_share_what_their_first_part_has(head):
  model = small("llama")[0].clone(head=head)
  variables = random_variables(model)
  source = np.append(np.arange(97), [7, 9])
  grown, more = checkpoints.resize(model, variables, source, {97: [7, 3], 98: [9]})
  tokens = np.arange(12).reshape(2, 6)
  old, new = apply(model, variables, tokens), apply(grown, more, tokens)
  np.testing.assert_allclose(new[..., :97], old, atol=1e-5)
  np.testing.assert_allclose(new[..., 97:], old[..., [7, 9]], atol=1e-5)


def test_tied_codebooks_and_integer_embeddings_are_resized():
  embedding = CodebookEmbedding(97, 32, 11)
  for layers in (
    {"embedding": embedding, "head": CodebookHead(97, 32, codes=11, embedding=embedding)},
    {"embedding": Int8Embedding(97, 32), "head": LowRankHead(97, 32, rank=5)},
  ):
    model = small("llama")[0].clone(**layers)
    variables = random_variables(model)
    order = np.random.default_rng(0).permutation(97)[:50]
    fewer, rows = checkpoints.resize(model, variables, order)
    tokens = np.arange(12).reshape(2, 6)
    old, new = apply(model, variables, order[tokens]), apply(fewer, rows, tokens)
    np.testing.assert_allclose(new, old[..., order], atol=1e-5)


def test_wrong_tokens_are_refused(tmp_path, capsys):
  model, variables = small("llama")
  with pytest.raises(ValueError, match=r"must name tokens in \[0, 97\); got 0 to 97"):
    checkpoints.resize(model, variables, np.arange(98))
  grouped = model.clone(head=GroupedHead(97, 32))
  with pytest.raises(ValueError, match="got a GroupedHead"):
    checkpoints.resize(grouped, random_variables(grouped), np.arange(97))
  tokenizer = trained("byte-level", tmp_path)
  saved(tokenizer, tmp_path / "model")
  for tokens, message in (
    (["new", "new"], "'new' twice"),
    (["the"], "'the' which is a token"),
    ([" "], "without a text"),
    ([], "got none"),
  ):
    with pytest.raises(ValueError, match=message):
      growing.grow(tmp_path / "model", tmp_path / "out", tokens)
  (tmp_path / "new.txt").write_text("\n".join(NEW) + "\n")
  (tmp_path / "text.txt").write_text(text())
  given = [str(tmp_path / "model"), "--tokens", str(tmp_path / "new.txt"), "--out"]
  given += [str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"), "--init", "match"]
  assert main(["grow", *given]) == 0
  assert "3 new tokens" in capsys.readouterr().out
  read = json.loads((tmp_path / "out" / "growing.json").read_text())
  assert [*read["ids"]] == NEW
  assert main(["grow", *given]) != 0  # `out` is there
