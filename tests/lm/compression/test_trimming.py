"""A trimmed model has the kept rows, and a tokenizer that restores every text."""

import json

import numpy as np
import pytest

from tests.lm.checkpoints.families import V, small
from tests.lm.checkpoints.test_gguf import plain, written
from vqjax.cli import main
from vqjax.lm import checkpoints
from vqjax.lm.compression import trimming
from vqjax.lm.tokenizers import from_pieces, load_tokenizer
from vqjax.lm.tokenizers.reading import JsonTokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "house", "of", "old"]


def text(seed=0, lines=120):
  """Lines of words, the first ones the most frequent."""
  draw = np.random.default_rng(seed)
  weights = 1 / np.arange(1, len(WORDS) + 1)
  one = lambda: " ".join(draw.choice(WORDS, 9, p=weights / weights.sum()))
  return "\n".join(one() for _ in range(lines)) + "\n"


def trained(kind, tmp_path, vocab=310):
  """A tokenizer.json of byte-level BPE, of BPE with byte fallback, or of Unigram."""
  lines = (text(9) + " zebra quartz jumping foxes " * 40).split("\n")
  bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
  if kind == "byte-level":
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=vocab, initial_alphabet=alphabet, special_tokens=special
    )
  else:
    special = ["<unk>", "<s>", "</s>"]
    model = tokenizers.Tokenizer(
      tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
      if kind == "fallback"
      else tokenizers.models.Unigram()
    )
    model.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    decoders = tokenizers.decoders
    model.decoder = decoders.Sequence(
      [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    model.post_processor = tokenizers.processors.TemplateProcessing(
      single="<s> $A", special_tokens=[("<s>", 1)]
    )
    trainer = (
      tokenizers.trainers.BpeTrainer(vocab_size=vocab, special_tokens=special + bytes_)
      if kind == "fallback"
      else tokenizers.trainers.UnigramTrainer(
        vocab_size=90, special_tokens=special, unk_token="<unk>"
      )
    )
  model.train_from_iterator(lines, trainer)
  if kind == "fallback":
    # The trainer makes the bytes special, which matches them in texts.
    state = json.loads(model.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in special]
    model = tokenizers.Tokenizer.from_str(json.dumps(state))
  model.add_tokens(["<extra>"])
  return JsonTokenizer(model, None if kind == "byte-level" else 1, (0,))


def saved(tokenizer, folder, **changes):
  model, variables = small("llama", vocab_size=tokenizer.vocab, **changes)
  checkpoints.save(folder, model, variables, tokenizer)
  return model, variables


@pytest.mark.parametrize("kind", ["byte-level", "fallback", "unigram"])
def test_a_text_of_kept_tokens_has_the_same_tokens_and_logits(kind, tmp_path):
  tokenizer = trained(kind, tmp_path)
  _, variables = saved(tokenizer, tmp_path / "model")
  keep = tokenizer.vocab - 5
  report = trimming.trim(tmp_path / "model", tmp_path / "out", keep, [text()])
  ids = json.loads((tmp_path / "out" / "trimming.json").read_text())["ids"]
  small_model, fewer, written = checkpoints.load(tmp_path / "out")
  assert small_model.head.vocab == report.kept == len(ids) == keep
  for layer in ("embedding", "head"):
    kept = np.asarray(variables["params"][layer]["weight"])[ids]
    np.testing.assert_array_equal(fewer["params"][layer]["weight"], kept)
  assert report.coverage > 0.95
  # Of what was counted every token is kept, and merges do not take another way.
  counted = text()[: text().index("\n", int(0.9 * len(text()))) + 1]
  old, new = tokenizer.encode(counted), written.encode(counted)
  back = [ids[token] for token in new]
  if kind == "unigram":
    # A file rounds scores anew, which may choose another of two orders of the same tokens.
    back, old = sorted(back), sorted(old)
  assert back == old
  assert written.decode(new) == tokenizer.decode(tokenizer.encode(counted))
  assert [ids[token] for token in written.eos] == list(tokenizer.eos)
  assert report.nats_per_byte_after <= report.nats_per_byte  # fewer tokens share the probability


@pytest.mark.parametrize("kind", ["byte-level", "fallback"])
def test_any_text_is_restored_from_few_tokens(kind, tmp_path):
  tokenizer = trained(kind, tmp_path)
  found = trimming.vocabulary(tokenizer)
  keep = len(found.required) + 1
  saved(tokenizer, tmp_path / "model")
  # Without spaces, which must be restored all the same.
  words = text().replace(" ", "")
  report = trimming.trim(tmp_path / "model", tmp_path / "out", keep, [words], scored=0)
  written = load_tokenizer(tmp_path / "out")
  assert report.kept == keep
  assert report.coverage < 1 < report.tokens_after / report.tokens
  assert report.restored_after == report.lines > 5
  assert report.nats_per_byte is None
  for line in ("zebra  quartz", "naïve 東京 🙂", "a\tb", "<0x41>"):
    assert written.decode(written.encode(line)) == line


def spoken(word):
  """The text of a token of whole letters."""
  return word.replace("\u0120", " ")


def test_tokens_that_others_are_merged_from_are_kept(tmp_path):
  tokenizer = trained("byte-level", tmp_path)
  found = trimming.vocabulary(tokenizer)
  number_of = {name: number for number, name in enumerate(found.names)}
  counts = np.zeros(tokenizer.vocab, np.int64)
  word = next(name for name in found.names if name.strip("\u0120") == "house")
  counts[number_of[word]] = 5
  kept = {found.names[token] for token in trimming.kept_tokens(found, counts, 280)}
  # The reference: what the library makes of the word with its first merges only, one after another.
  state = json.loads(tokenizer.model.to_str())
  merges, steps = state["model"]["merges"], set()
  for count in range(len(merges) + 1):
    state["model"]["merges"] = merges[:count]
    steps |= {*tokenizers.Tokenizer.from_str(json.dumps(state)).encode(spoken(word)).tokens}
  assert word in steps <= kept
  rebuilt = found.rebuilt(trimming.kept_tokens(found, counts, 280))
  assert len(rebuilt.encode(spoken(word))) == 1


def test_sentencepiece_models_are_trimmed(tmp_path):
  joins = ["th", "the", "at", "cat", "zz", "zzz", "\u2581the", "\u2581cat", "\u2581t", "\u2581th"]
  letters = ["\u2581", *map(chr, range(97, 123))]
  names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joins, *letters]
  types = [2, 3, 3, *[6] * 256, *[1] * (len(names) - 259), 3, 4]
  names += ["<turn>", "<tool>"]
  scores = [0.0] * 259 + [-float(n) for n in range(len(names) - 259)]
  options = {"bos": 1, "eos": [2], "add_space": True, "add_bos": True}
  tokenizer = from_pieces(names, scores, types, **options)
  saved(tokenizer, tmp_path / "model")
  report = trimming.trim(
    tmp_path / "model", tmp_path / "out", 273, ["<tool>the cat\n" * 50], scored=0
  )
  written = load_tokenizer(tmp_path / "out")
  ids = json.loads((tmp_path / "out" / "trimming.json").read_text())["ids"]
  assert report.coverage == 1
  for line in ("the cat", "the cat<turn><tool>the</s>"):
    assert [ids[token] for token in written.encode(line)] == tokenizer.encode(line)
    assert written.decode(written.encode(line)) == tokenizer.decode(tokenizer.encode(line))
  assert not {names.index("zz"), names.index("zzz")} & set(ids)
  assert written.decode(written.encode("zzz ü")) == "zzz ü"


@pytest.mark.slow
def test_stories260k_loses_nothing_with_the_tokens_of_its_language(real_data, tmp_path):
  content = (real_data / "tinystories" / "gpt2_tokens_val.decoded.txt").read_text("utf-8")
  content = content[:200_000].replace("<|endoftext|>", "")
  path = real_data / "stories260K" / "stories260K.bin"
  report = trimming.trim(path, tmp_path / "out", 500, [content], scored=6000)
  assert report.coverage == 1
  assert report.tokens_after == report.tokens
  # Tokens that never occur have next to no probability.
  np.testing.assert_allclose(report.nats_per_byte_after, report.nats_per_byte, atol=1e-3)


def test_files_of_other_libraries_have_the_new_numbers(tmp_path):
  tokenizer = trained("fallback", tmp_path)
  saved(tokenizer, tmp_path / "model")
  extra = tokenizer.vocab - 1
  (tmp_path / "model" / "tokenizer_config.json").write_text(
    json.dumps({"added_tokens_decoder": {"1": {"content": "<s>"}, str(extra): {"content": "x"}}})
  )
  (tmp_path / "model" / "generation_config.json").write_text(
    json.dumps({"bos_token_id": 1, "eos_token_id": [0, 2], "pad_token_id": extra})
  )
  trimming.trim(tmp_path / "model", tmp_path / "out", 280, [text()], scored=0)
  read = lambda name: json.loads((tmp_path / "out" / name).read_text())
  ids = read("trimming.json")["ids"]
  assert extra not in ids
  assert read("generation_config.json")["eos_token_id"] == [ids.index(0), ids.index(2)]
  assert read("generation_config.json")["pad_token_id"] is None
  assert read("tokenizer_config.json")["added_tokens_decoder"] == {
    str(ids.index(1)): {"content": "<s>"}
  }


BYTE_LEVEL = {
  "tokenizer.ggml.model": "gpt2",
  "tokenizer.ggml.pre": "gpt-2",
  "tokenizer.ggml.tokens": [
    *("<s>", "</s>", "<pad>", "\u0120", *map(chr, range(35, 123))),
    *("th", "the", "\u0120c", "zz", "zzz"),
  ],
  "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 94],
  "tokenizer.ggml.merges": ["t h", "z z", "th e", "zz z", "\u0120 c"],
  "tokenizer.ggml.bos_token_id": 0,
  "tokenizer.ggml.eos_token_id": 1,
  "tokenizer.ggml.padding_token_id": 2,
  "tokenizer.ggml.fim_pre_token_id": 96,
  "tokenizer.huggingface.json": "{}",
  "llama.vocab_size": V,
}


@pytest.mark.parametrize(("more", "free"), [({}, 9), (BYTE_LEVEL, 3)], ids=["pieces", "byte-level"])
def test_a_gguf_keeps_its_block_types_byte_for_byte(more, free, tmp_path):
  gguf = pytest.importorskip("gguf", reason="the extra `checkpoints` is not installed")
  model, variables = plain("llama")
  checkpoints.save(tmp_path / "folder", model, variables)
  path, out = tmp_path / "model.gguf", tmp_path / "out" / "model.gguf"
  written(path, "llama", tmp_path / "folder", gguf.GGMLQuantizationType.Q4_0, more)
  keep = len(trimming.vocabulary(load_tokenizer(path)).required) + free
  report = trimming.trim(path, tmp_path / "out", keep, ["a cat the cat on the cat"] * 20, scored=0)
  ids = np.array(json.loads((tmp_path / "out" / "trimming.json").read_text())["ids"])
  before, after = (gguf.GGUFReader(file) for file in (path, out))
  for old, new in zip(before.tensors, after.tensors, strict=True):
    assert (new.name, new.tensor_type) == (old.name, old.tensor_type)
    is_table = old.name in ("token_embd.weight", "output.weight")
    np.testing.assert_array_equal(new.data, old.data[ids] if is_table else old.data)
  sizes = [
    sum(t.n_bytes for t in file.tensors if t.name in ("token_embd.weight", "output.weight"))
    for file in (before, after)
  ]
  assert sizes == [report.table_bytes, report.table_bytes_after]
  whole, trimmed = load_tokenizer(path), load_tokenizer(tmp_path / "out")
  tokens = trimmed.encode("on the cat")
  assert ids[tokens].tolist() == whole.encode("on the cat")
  assert trimmed.decode(tokens) == "on the cat"
  assert ids[list(trimmed.eos)].tolist() == list(whole.eos)
  loaded = checkpoints.load(tmp_path / "out").variables["params"]["head"]["weight"]
  head = next(tensor for tensor in before.tensors if tensor.name == "output.weight")
  np.testing.assert_array_equal(loaded, gguf.dequantize(head.data, head.tensor_type)[ids])
  assert "tokenizer.huggingface.json" not in after.fields
  assert "tokenizer.ggml.fim_pre_token_id" not in after.fields


def test_impossible_calls_are_refused_and_leave_nothing(tmp_path, capsys):
  tokenizer = trained("byte-level", tmp_path)
  saved(tokenizer, tmp_path / "model")
  (tmp_path / "text").write_text(text())
  (tmp_path / "foreign").write_text("東京" * 500)
  (tmp_path / "empty").write_text("\n\n")

  def call(keep, name="text", out="out", model="model"):
    arguments = [str(tmp_path / model), "--keep-tokens", str(keep), "--scored", "0"]
    arguments += ["--text", str(tmp_path / name), "--out", str(tmp_path / out)]
    code = main(["trim", *arguments])
    return code, capsys.readouterr().err

  assert call(tokenizer.vocab + 1)[0] == 2
  assert f"at most {tokenizer.vocab:,}" in call(tokenizer.vocab + 1)[1] + call(9999)[1]
  assert "special tokens and bytes that must stay" in call(100)[1]
  assert "tokens that the model knows" in call(300, "foreign")[1]
  assert "must have text" in call(300, "empty")[1]
  assert "must be new" in call(300, out="text")[1]
  with pytest.raises(ValueError, match="`scored` must be 0 or more characters; got -5"):
    trimming.trim(tmp_path / "model", tmp_path / "out", 300, [text()], scored=-5)
  for file in (tmp_path / "model").glob("tokenizer*"):
    file.unlink()
  assert "must have a tokenizer" in call(300)[1]
  assert {path.name for path in tmp_path.iterdir()} == {"model", "text", "foreign", "empty"}


def test_tokenizers_of_other_kinds_are_refused(tmp_path):
  model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
  with pytest.raises(ValueError, match=r"BPE without affixes, or Unigram.*got WordLevel"):
    trimming.vocabulary(JsonTokenizer(model, None, ()))
