"""Tokenizers have the ids of the libraries that they come from, and tell when they do not fit."""

import json
import pathlib
import unicodedata

import numpy as np
import pytest

from tests.lm.checkpoints.families import small
from tests.lm.checkpoints.report import mixed_lines
from vqjax.lm import checkpoints
from vqjax.lm.sources import readers
from vqjax.lm.tokenizers import byte_level, reading

library = pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")
sentencepiece = pytest.importorskip("sentencepiece", reason="the extra `checkpoints` is missing")


@pytest.fixture
def folder(tmp_path):
  """A saved model of 97 tokens."""
  checkpoints.save(tmp_path / "model", *small("llama"))
  return tmp_path / "model"


def words_of(count):
  """A tokenizer.json of so many tokens, which adds the first one before a text."""
  names = ["<s>", *(f"w{number}" for number in range(count - 1))]
  model = library.models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="w0")
  made = library.Tokenizer(model)
  made.pre_tokenizer = library.pre_tokenizers.Whitespace()
  made.post_processor = library.processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", 0)]
  )
  made.add_special_tokens(["<s>"])
  return made


@pytest.mark.programs(30)
def test_a_tokenizer_json_is_read_with_what_begins_a_text(folder, tmp_path):
  words_of(97).save(str(folder / "tokenizer.json"))
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [3, 5]}))
  model, variables, found = checkpoints.load(folder)
  assert found.encode("w4 w1") == [0, 5, 2]
  assert found.encode("w4 w1", special=False) == [5, 2]
  assert found.decode([0, 5, 2]) == "w4 w1"
  assert (found.vocab, found.eos) == (97, (3, 5))
  checkpoints.save(tmp_path / "again", model, variables, found)
  again = reading.load_tokenizer(tmp_path / "again")
  assert (again.encode("w4 w1"), again.eos) == ([0, 5, 2], (3, 5))


def test_canonical_ids_are_those_of_the_normalizers_of_the_library():
  n, end = library.normalizers, "\ue000"
  steps = [n.NFKC(), n.NFD(), n.StripAccents(), n.Lowercase()]
  steps += [n.Replace(library.Regex(r"[ \t\r\n]+"), " "), n.Replace(library.Regex("^ $"), end)]
  normal = n.Sequence([*steps, n.Strip(), n.Replace(end, " ")])
  pieces = ["a", "A", " a", "\u00c4", "a\u0308", "\t", " \r\n ", "\ufb01x", "FIX", "\u0130", "i"]
  pieces += [
    "\u03a3\u03a3",
    "\u03c3\u03c3",
    "\u0301",
    "\u2167",
    "viii",
    "\uff21",
    "\u00a0",
    "a b",
    "A  B",
  ]

  class Words(reading.Tokenizer):
    vocab = len(pieces) + 3

    def decode(self, tokens):
      return [*pieces, "\ufffd", "\ufffd", ""][tokens[0]]

    def piece(self, token):
      return f"<{token}>"

  known, expected = {}, []
  for piece in pieces:
    expected.append(known.setdefault(normal.normalize_str(piece) or piece, len(known)))
  found = reading.canonical_ids(Words())
  assert found == (*expected, *(len(known) + i for i in range(3)))
  assert found[:4] == (0,) * 4


@pytest.mark.parametrize("count", [32, 98])
def test_a_tokenizer_of_another_size_is_refused(folder, count):
  words_of(count).save(str(folder / "tokenizer.json"))
  with pytest.raises(ValueError, match=rf"must have the model's 97 tokens.*got {count}"):
    checkpoints.load(folder)


def test_a_damaged_tokenizer_is_refused(folder):
  (folder / "tokenizer.json").write_text("{")
  with pytest.raises(ValueError, match=r"tokenizer.json must be a tokenizer"):
    checkpoints.load(folder)
  (folder / "tokenizer.json").unlink()
  (folder / "tokenizer.model").write_bytes(b"\x01\x02")
  with pytest.raises(ValueError, match="must be a SentencePiece model"):
    checkpoints.load(folder)
  (folder / "tokenizer.model").unlink()
  with pytest.raises(FileNotFoundError, match="must have a tokenizer"):
    reading.load_tokenizer(folder)


def test_an_end_of_text_that_is_no_number_is_refused(folder):
  words_of(97).save(str(folder / "tokenizer.json"))
  config = json.loads((folder / "config.json").read_text())
  for changes in ({"bos_token_id": "<s>"}, {"eos_token_id": [3, -1]}):
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=r"`(bos|eos)_token_id` of .* must be a token's number"):
      checkpoints.load(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A SentencePiece BPE with bytes and with runs of spaces as pieces, trained on mixed lines."""
  prefix = str(tmp_path_factory.mktemp("pieces") / "model")
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(list(mixed_lines(500))),
    model_prefix=prefix,
    model_type="bpe",
    vocab_size=460,
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    add_dummy_prefix=False,
    user_defined_symbols=["\u2581\u2581", "\u2581\u2581\u2581", "<mask>"],
    hard_vocab_limit=False,
    minloglevel=2,
  )
  return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def test_pieces_with_scores_give_the_ids_of_the_model_that_they_come_from(trained):
  numbers = range(trained.vocab_size())
  pieces = [trained.id_to_piece(number) for number in numbers]
  user_defined = {"\u2581\u2581", "\u2581\u2581\u2581", "<mask>"}

  def kind(number):
    if trained.is_byte(number):
      return 6
    if pieces[number] in user_defined:
      return 4
    return 2 if trained.is_unknown(number) else 3 if trained.is_control(number) else 1

  # As a GGUF has them: user-defined runs of spaces are written as spaces.
  types = [kind(number) for number in numbers]
  given = [p.replace("\u2581", " ") if t == 4 else p for p, t in zip(pieces, types)]
  scores = [trained.get_score(number) for number in numbers]
  options = {"bos": 1, "eos": [2], "add_space": False, "add_bos": True}
  found = reading.from_pieces(given, scores, types, **options)
  for line in mixed_lines(2000):
    assert found.encode(line, special=False) == trained.encode(line), line
    assert found.encode(line) == [1, *trained.encode(line)]
    assert found.decode(found.encode(line)) == trained.decode(trained.encode(line))


def test_a_tokenizer_is_made_again_from_its_state(trained):
  for made in (
    reading.PiecesTokenizer(trained.serialized_model_proto(), 1, [2]),
    reading.JsonTokenizer(words_of(97), 0, [1]),
  ):
    again = reading.from_state(made.state())
    assert again.encode("w4 the 東京") == made.encode("w4 the 東京")
    assert (again.bos, again.eos, again.vocab) == (made.bos, made.eos, made.vocab)
  with pytest.raises(ValueError, match="`state` must be that of a tokenizer"):
    reading.from_state("{}")


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_ids_without_a_token_have_no_text_and_surrogates_no_ids(kind, trained):
  made = reading.JsonTokenizer(words_of(97), 0, [1])
  if kind == "pieces":
    made = reading.PiecesTokenizer(trained.serialized_model_proto(), 1, [2])
  ids = made.encode("w4")
  # Rows of generated tokens end with -1.
  assert made.decode([*ids, -1, made.vocab, 2**40]) == made.decode(ids) == "w4"
  assert made.piece(-1) == made.piece(2**40) == ""
  with pytest.raises(ValueError, match=r"got the surrogate '\\udcff' at character 1.*errors="):
    made.encode(b"a\xff".decode(errors="surrogateescape"))


def test_a_byte_order_mark_before_a_json_is_no_damage(folder):
  words_of(97).save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text('{"eos_token": "w1"}', "utf-8-sig")
  assert reading.load_tokenizer(folder).eos == (2,)


LETTERS = sorted(library.pre_tokenizers.ByteLevel.alphabet())
"""The letters that stand for bytes."""


def words_by(rule, text):
  """The words of a text by a rule, as text."""
  model = byte_level.byte_level({letter: at for at, letter in enumerate(LETTERS)}, [], rule)
  return [text[a:b] for _, (a, b) in model.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("names", byte_level.NAMES)
def test_words_of_each_rule_join_to_the_text(names):
  for line in mixed_lines(100):
    assert "".join(words_by(byte_level.NAMES[names], line)) == line


DIGITS = {
  "gpt-2": ["a", " 1234567"],
  "llama-bpe": ["a", " ", "123", "456", "7"],
  "qwen2": ["a", " ", *"1234567"],
  "smollm": ["a", " ", *"1234567"],
  "falcon": ["a", " ", "123", "456", "7"],
  "afmoe": ["a", " ", "1", "234", "567"],
  "superbpe": ["a ", "1", "234", "567"],
}


@pytest.mark.parametrize("name", DIGITS)
def test_digits_are_split_as_the_rule_says(name):
  found = words_by(byte_level.RULES[name], "a 1234567")
  if name == "falcon":  # GPT-2's words first, and the space stays with the first digits
    assert found == ["a", " ", "123", "456", "7"]
  else:
    assert found == DIGITS[name]


@pytest.fixture(scope="module")
def gpt2(real_data, tmp_path_factory):
  """A folder with GPT-2's own files, and a config of its size."""
  folder = tmp_path_factory.mktemp("gpt2")
  for name in ("vocab.json", "merges.txt"):
    (folder / name).write_bytes((real_data / "tokenizers" / "gpt2" / name).read_bytes())
  return folder


def test_gpt2_has_its_published_ids(gpt2, real_data):
  source = readers.ModelSource(
    gpt2, "safetensors", {"model_type": "gpt2", "eos_token_id": 50256}, {}
  )
  found = reading.find_tokenizer(source)
  ids = np.fromfile(real_data / "tinystories" / "gpt2_tokens_test.uint16.bin", "<u2")[:20_000]
  text = found.model.decode(ids.tolist(), skip_special_tokens=False)
  assert found.encode(text) == ids.tolist()
  assert found.vocab == 50257
  assert max(reading.canonical_ids(found)) + 1 == 32_962  # as docs/ngrams.md says


@pytest.mark.slow
def test_transformers_has_the_same_ids_for_ten_thousand_lines(gpt2, trained, tmp_path):
  transformers = pytest.importorskip("transformers", reason="`make parity` installs transformers")
  source = readers.ModelSource(gpt2, "safetensors", {"model_type": "gpt2"}, {})
  found = reading.find_tokenizer(source)
  merges = pathlib.Path(gpt2 / "merges.txt")
  if not merges.read_text("utf-8").startswith("#version"):
    merges.write_text("#version: 0.2\n" + merges.read_text("utf-8"), "utf-8")
  reference = transformers.GPT2TokenizerFast.from_pretrained(gpt2)
  lines = list(mixed_lines(10_000))
  assert [found.encode(line) for line in lines] == reference(lines)["input_ids"]
  # Qwen's tokenizer with these tokens and merges.
  vocab = json.loads((gpt2 / "vocab.json").read_text("utf-8"))
  pairs = [tuple(line.split(" ")) for line in merges.read_text("utf-8").split("\n")[1:] if line]
  qwen = transformers.Qwen2Tokenizer(vocab=vocab, merges=pairs)
  end = byte_level.AddedToken("<|endoftext|>", vocab["<|endoftext|>"])
  own = byte_level.byte_level(vocab, pairs, byte_level.RULES["qwen2"], [end])
  assert [own.encode(line).ids for line in lines] == qwen(lines)["input_ids"]


def write_byte_level_gguf(path, pattern, folder):
  """A GGUF with GPT-2's tokens and merges, a control token and one that a user defined."""
  gguf = pytest.importorskip("gguf", reason="the extra `checkpoints` is not installed")
  vocab = json.loads((folder / "vocab.json").read_text("utf-8"))
  tokens = [*sorted(vocab, key=vocab.get), "<|begin|>", "<|mask|>"]
  kinds = [1] * (len(vocab) - 1) + [3, 3, 4]  # <|endoftext|> is GPT-2's last
  lines = (folder / "merges.txt").read_text("utf-8").split("\n")
  writer = gguf.GGUFWriter(path, "llama")
  for add in (writer.add_block_count, writer.add_head_count, writer.add_head_count_kv):
    add(1)
  writer.add_embedding_length(8)
  writer.add_feed_forward_length(8)
  writer.add_context_length(64)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pattern)
  writer.add_token_list(tokens)
  writer.add_token_types(kinds)
  writer.add_token_merges([line for line in lines if line and not line.startswith("#version")])
  writer.add_bos_token_id(len(vocab))
  writer.add_eos_token_id(len(vocab) - 1)
  writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_a_byte_level_gguf_has_the_ids_of_the_regular_expression_that_the_library_has(
  gpt2, tmp_path
):
  found = reading.load_tokenizer(write_byte_level_gguf(tmp_path / "model.gguf", "gpt-2", gpt2))
  # The pre-tokenizer of the library with its own expression, which is GPT-2's.
  own = library.ByteLevelBPETokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
  for line in mixed_lines(300):
    assert found.encode(line) == own.encode(line).ids, line
    assert found.decode(found.encode(line)) == line
  assert found.encode("a<|mask|><|endoftext|>") == [64, 50_258, 50_256]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-llm"])
def test_llama_cpp_has_the_same_ids_of_byte_level_ggufs(pattern, gpt2, tmp_path):
  llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
  path = write_byte_level_gguf(tmp_path / "model.gguf", pattern, gpt2)
  found = reading.load_tokenizer(path)
  other = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
  # Qwen's own tokenizer composes characters, as "e\u0301", which llama.cpp leaves out.
  form = (lambda s: unicodedata.normalize("NFC", s)) if pattern == "qwen2" else str
  differing = [
    line
    for line in mixed_lines(10_000)
    if found.encode(line) != other.tokenize(form(line).encode(), add_bos=pattern == "llama-bpe")
  ]
  assert differing == []
