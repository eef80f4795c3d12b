"""Tokens that control a model are one id each, texts keep what is text, and the ends are known."""

import json
import pathlib
import warnings

import pytest

from vqjax.lm.generation import TextStream
from vqjax.lm.sources.readers import ModelSource
from vqjax.lm.tokenizers import reading

library = pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")
sentencepiece = pytest.importorskip("sentencepiece", reason="the extra `checkpoints` is missing")

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = sorted(library.pre_tokenizers.ByteLevel.alphabet())
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def of_gguf(name="", **keys):
  """The tokenizer of a GGUF of this name with these keys, which follow "tokenizer.ggml."."""
  metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
  metadata["general.name"] = name
  return reading.find_tokenizer(ModelSource(pathlib.Path("m.gguf"), "gguf", {}, {}, (), metadata))


def of_words(extra, types, **keys):
  """A GGUF of bytes and `hi`, and further tokens of these types."""
  tokens = [*LETTERS, "hi", *extra]
  kinds = [NORMAL] * 257 + types
  given = {"model": "gpt2", "pre": "gpt-2", "merges": ["h i"], "tokens": tokens}
  return of_gguf(**given | {"token_type": kinds} | keys)


def of_pieces(extra, types, **keys):
  """A GGUF of SentencePiece's kind with bytes, `hi` and a space, and further pieces."""
  tokens = ["<unk>", "<s>", "</s>", *extra, *BYTES, "hi", "▁"]
  kinds = [UNKNOWN, CONTROL, CONTROL, *types, *[BYTE] * 256, NORMAL, NORMAL]
  given = {"model": "llama", "tokens": tokens, "token_type": kinds}
  return of_gguf(**given | {"scores": [0.0] * len(tokens), "bos_token_id": 1} | keys)


@pytest.mark.parametrize("special", [True, False])
def test_control_tokens_of_pieces_are_one_id_each(special):
  found = of_pieces(["<turn>", "<turn>x"], [CONTROL, USER_DEFINED], add_space_prefix=False)
  text = "<turn>hi</s><turn>x<unk><s>hi"
  expected = [3, 261, 2, 4, 0, 1, 261]
  assert found.encode(text, special=special) == [1] * special + expected
  # Control tokens are left out of a text, and tokens that a user defined are not.
  assert found.decode(found.encode(text)) == "hi<turn>xhi"


def test_pieces_without_keys_begin_and_end_with_the_usual_control_tokens():
  for kind, bos, eos in ((CONTROL, 1, (2,)), (NORMAL, None, ())):
    tokens, types = ["<unk>", "a", "b"], [UNKNOWN, kind, kind]
    found = of_gguf(model="llama", tokens=tokens, token_type=types, scores=[0.0] * 3)
    assert (found.bos, found.eos, found.encode("")) == (bos, eos, [1] if bos else [])


def test_a_space_is_put_before_each_text_behind_a_token():
  found = of_pieces(["<turn>", "<mask>"], [CONTROL, USER_DEFINED])
  assert found.encode("hi<turn>hi<mask>hi", special=False) == [262, 261, 3, 262, 261, 4, 262, 261]
  # As in llama.cpp and in transformers' `legacy`.
  assert found.decode(found.encode("hi<turn>hi")) == "hi hi"


def test_tokens_of_phi_3_take_the_spaces_behind_them():
  for name, spaces in (("Phi-3-mini", []), ("Mini", [261])):
    found = of_pieces(["<|user|>"], [CONTROL], name=name, add_space_prefix=False)
    hi = found.encode("hi", special=False)
    assert found.encode("<|user|> hi<s> hi", special=False) == [3, *spaces, *hi, 1, 261, *hi]


def test_user_defined_tokens_of_words_stay_in_a_text():
  found = of_words(["<think>", "éé", "<|end_of_turn|>"], [USER_DEFINED, USER_DEFINED, CONTROL])
  text = "<think>hi ééé\n</think>hi"
  assert found.encode("<think>hiéé") == [257, 256, 258]
  assert found.decode(found.encode(text + "<|end_of_turn|>")) == text


ENDS = {
  "the file's own, first": (["<a>", "<|im_end|>"], {"eos_token_id": 257}, [257, 258]),
  "the end of a turn and of a message": (
    ["<a>", "<b>", "<c>"],
    {"eos_token_id": 259, "eot_token_id": 257, "eom_token_id": 258},
    [259, 257, 258],
  ),
  "known by their texts": (["<|eot_id|>", "<|fim_pad|>", "<end_of_turn>"], {}, [257, 259, 258]),
  "a file's key instead of a text": (["[PAD]", "<x>"], {"fim_pad_token_id": 258}, [258]),
  "the end of a message of gpt-oss is none": (
    ["<|end|>", "<|return|>", "<|call|>"],
    {"eos_token_id": 258},
    [258, 259],
  ),
}


@pytest.mark.parametrize("case", ENDS)
def test_ends_of_a_gguf_are_those_of_llama_cpp(case):
  extra, keys, expected = ENDS[case]
  assert list(of_words(extra, [CONTROL] * len(extra), **keys).eos) == expected


def test_a_token_that_looks_like_an_end_is_one_whatever_its_type_except_a_tag_of_html():
  found = of_words(["<|im_end|>", "</s>"], [NORMAL, NORMAL], merges=["h i"])
  assert found.eos == (257,)
  assert found.encode("<|im_end|>hi") == [257, 256]
  assert found.decode(found.encode("</s>hi<|im_end|>")) == "</s>hi"
  assert of_words(["</s>"], [CONTROL]).eos == (257,)


def test_messages_of_gpt_oss_keep_their_marks():
  found = of_words(["<|channel|>", "<|end|>", "<|return|>", "<|call|>"], [CONTROL] * 4)
  assert found.decode(found.encode("<|channel|>hi<|end|><|return|>")) == "<|channel|>hi<|end|>"


def test_rows_of_a_padded_table_have_no_piece():
  extra, types = ["<x>", "[PAD258]", "[PAD259]", "other"], [CONTROL, USER_DEFINED, UNUSED, UNUSED]
  for found in (of_words(extra, types), of_pieces(["<x>", "[PAD4]", "z"], [CONTROL, 1, UNUSED])):
    last = found.encode("<x>", special=False)[0]
    assert found.piece(last) == "<x>"
    assert found.piece(last + 1) == found.piece(last + 2) == ""
    assert found.pieces == last + 1
    assert found.decode([last, last + 1, last + 2, *found.encode("hi", special=False)]) == "hi"
    again = reading.from_state(found.state())
    assert (again.pieces, again.vocab, again.eos) == (found.pieces, found.vocab, found.eos)


def test_a_gguf_without_a_rule_for_words_is_read_by_llama_cpps_default_with_a_warning():
  with pytest.warns(UserWarning, match=r"no tokenizer.ggml.pre.*gguf-new-metadata"):
    found = (
      of_words([], [], pre=None)
      if False
      else of_gguf(model="gpt2", tokens=[*LETTERS, "hi"], merges=["h i"])
    )
  words = found.model.pre_tokenizer.pre_tokenize_str("a 1234")
  assert [word for word, _ in words] == ["a", "Ġ", "123", "4"]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    of_words([], [])


WRONG = {
  "an unknown rule": ({"pre": "other"}, "llama, gpt2 or gemma4"),
  "another kind": ({"model": "bert"}, "llama, gpt2 or gemma4"),
  "a rule that is a number": ({"pre": 3}, "pre"),
  "tokens that are numbers": ({"tokens": [1, 2]}, "tokens"),
  "a token twice": ({"tokens": ["a", "a"], "token_type": [1, 1]}, "'a' twice"),
  "too few types": ({"token_type": [1]}, "token_type"),
  "types that are texts": ({"token_type": ["1"] * 257}, "token_type"),
  "an unknown type": ({"token_type": [9] * 257}, "token_type"),
  "merges of another type": ({"merges": [1]}, "merges"),
  "pieces without scores": ({"model": "llama"}, "scores"),
  "a merge of one token": ({"merges": ["hi"]}, "merges"),
  "a merge of other tokens": ({"merges": ["x yz"]}, "merges"),
  "an end beyond the vocabulary": ({"eos_token_id": 300}, "eos_token_id"),
  "an end that is a text": ({"eot_token_id": "x"}, "eot_token_id"),
  "a flag that is a number": ({"add_bos_token": 1}, "add_bos_token"),
  "a BOS that is not there": ({"add_bos_token": True}, "bos_token_id"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_of_a_gguf_is_named_with_its_file(case):
  keys, part = WRONG[case]
  with pytest.raises(ValueError, match=r"m\.gguf.* must be") as error:
    of_words([], [], **keys)
  assert part in str(error.value)


def test_a_gguf_of_words_without_merges_is_refused():
  with pytest.raises(ValueError, match=r"`tokenizer.ggml.merges` of m.gguf must be there"):
    of_gguf(model="gpt2", pre="gpt-2", tokens=["a"])


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_a_saved_tokenizer_of_a_gguf_has_the_same_ids(kind, tmp_path):
  of, id_ = {"words": (of_words, 257), "pieces": (of_pieces, 3)}[kind]
  for add_bos in (True, False):
    keys = {"add_bos_token": add_bos, "bos_token_id": id_, "eos_token_id": id_ + 1}
    found = of(["<bos>", "<eos>", "<m>"], [CONTROL, CONTROL, USER_DEFINED], **keys)
    folder = tmp_path / str(add_bos)
    folder.mkdir()
    found.save(folder)
    ends = {"bos_token_id": found.bos, "eos_token_id": list(found.eos)}
    source = ModelSource(folder, "safetensors", {"model_type": "llama"} | ends, {})
    again = reading.find_tokenizer(source)
    for text in ("hi <m> hi<eos>hi", "", "<bos>hi"):
      assert again.encode(text) == found.encode(text)
      assert again.decode(again.encode(text)) == found.decode(found.encode(text))
    assert (again.encode("")[:1] == [id_]) == add_bos


def write(folder, **files):
  """Writes files of JSON into a folder; `_` in a name is kept, and ".json" is added."""
  folder.mkdir(exist_ok=True)
  for name, content in files.items():
    (folder / f"{name}.json").write_text(json.dumps(content))
  return folder


def of_folder(folder, **config):
  """The tokenizer of a folder with this config."""
  return reading.find_tokenizer(
    ModelSource(folder, "safetensors", {"model_type": "llama"} | config, {})
  )


@pytest.fixture
def words(tmp_path):
  """A folder with vocab.json and merges.txt alone."""
  vocab = {letter: number for number, letter in enumerate([*LETTERS, "hi", "<|endoftext|>"])}
  (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
  return write(tmp_path, vocab=vocab)


def test_added_tokens_of_a_folder_without_tokenizer_json_are_read(words):
  write(
    words,
    added_tokens={"<|im_start|>": 258, "<tool>": 260},
    tokenizer_config={
      "additional_special_tokens": ["<|im_start|>"],
      "eos_token": {"content": "<|im_end|>"},
      "bos_token": "<|endoftext|>",
      "added_tokens_decoder": {"261": {"content": "<|im_end|>", "special": True, "rstrip": True}},
      "tokenizer_class": "Qwen2Tokenizer",
    },
  )
  found = of_folder(words)
  assert found.encode("<|im_start|>hi<tool>é1<|im_end|>  hi") == [
    *(258, 256, 260),
    *found.encode("é1"),
    *(261, 256),
  ]
  assert found.encode("<|endoftext|>") == [257]
  assert found.decode([258, 256, 260, 261, 257]) == "hi<tool>"
  assert (found.bos, found.eos, found.vocab, found.pieces) == (257, (261,), 262, 259)
  assert found.piece(259) == ""
  # Ids of a config precede names.
  assert of_folder(words, eos_token_id=[257]).eos == (257,)
  assert found.encode("e\u0301") == found.encode("\u00e9")  # Qwen's composes characters


def test_a_named_token_keeps_its_flags(words):
  mask = {"content": "<mask>", "lstrip": True}
  write(words, special_tokens_map={"mask_token": mask}, added_tokens={"<mask>": 258})
  assert of_folder(words).encode("hi  <mask>") == [256, 258]


def test_settings_of_a_folder_without_tokenizer_json_are_kept(words):
  assert of_folder(words).encode("hi") == [256]
  config = {"add_bos_token": True, "bos_token": "<|endoftext|>", "add_prefix_space": True}
  write(words, tokenizer_config=config)
  assert of_folder(words).encode("hi") == [257, LETTERS.index("Ġ"), 256]
  with pytest.raises(ValueError, match=r"`bos_token_id` of .* must be a token"):
    of_folder(words, bos_token_id=999)


@pytest.fixture
def with_json(words):
  """A folder with a tokenizer.json, whose `<|im_end|>` is text."""
  model = of_folder(words).model
  model.add_tokens(["<|im_end|>"])
  model.save(str(words / "tokenizer.json"))
  return words


def test_tokens_that_are_beside_a_tokenizer_json_are_added_to_it(with_json):
  decoder = {
    "259": {"content": "<tool>", "special": False, "lstrip": True, "normalized": False},
    "257": {"content": "<|endoftext|>", "special": True},
  }
  config = {
    "eos_token": "<|im_end|>",
    "extra_special_tokens": {"image_token": "<image>"},
    "pad_token": "<pad>",
    "added_tokens_decoder": decoder,
  }
  write(with_json, tokenizer_config=config, added_tokens={"<tool_end>": 260})
  found = of_folder(with_json)
  ids = [256, 259, 256, 260, 258, 261, 262]
  assert found.encode("hi <tool>hi<tool_end><|im_end|><pad><image>") == ids
  assert found.decode(ids) == "hi<tool>hi<tool_end>"
  assert (found.eos, of_folder(with_json, eos_token_id=[257]).eos) == ((258,), (257,))
  # An id that tokenizer.json contradicts, or that does not follow.
  for entry in ({"300": {"content": "<far>"}}, {"256": {"content": "<far>"}}):
    write(with_json, tokenizer_config=config | {"added_tokens_decoder": decoder | entry})
    with pytest.warns(UserWarning, match="tokenizer.json has other ids than .* '<far>' is left"):
      assert of_folder(with_json).encode("hi <tool><pad>") == [256, 259, 261]


FOLDERS = {
  "another tokenizer": ({"tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}}, "json"),
  "an id of another token": ({"added_tokens": {"<x>": 3}}, "<x>"),
  "one id for two tokens": ({"added_tokens": {"<x>": 258, "<y>": 258}}, "258"),
  "an id far behind the vocabulary": ({"added_tokens": {"<x>": 2**40}}, "1099511627776"),
  "a token without text": ({"added_tokens": {"": 258}}, "258"),
  "a number of many digits": (
    {"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}}},
    "tokenizer_config.json",
  ),
  "an id that is a text": ({"added_tokens": {"<x>": "258"}}, "'258'"),
  "a flag that is a text": ({"tokenizer_config": {"add_bos_token": "no"}}, "add_bos_token"),
  "a class that is a number": ({"tokenizer_config": {"tokenizer_class": 1}}, "tokenizer_class"),
  "entries that are a list": (
    {"tokenizer_config": {"added_tokens_decoder": [1]}},
    "added_tokens_decoder",
  ),
  "tokens of a vocabulary without numbers": ({"vocab": {"a": []}}, "vocab.json"),
  "merges of other tokens": ({"vocab": {"a": 0}}, "merges.txt"),
  "an entry without its text": (
    {"tokenizer_config": {"added_tokens_decoder": {"258": {"special": True}}}},
    "tokenizer_config.json",
  ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_wrong_added_token_is_named(case, words):
  files, part = FOLDERS[case]
  with pytest.raises(ValueError, match="must") as error:
    of_folder(write(words, **files))
  assert part in str(error.value)
  assert str(words) in str(error.value)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
  """A SentencePiece model with a control token, which puts a space before a text."""
  prefix = str(tmp_path_factory.mktemp("pieces") / "model")
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["hi the world hi"] * 50),
    model_prefix=prefix,
    model_type="bpe",
    vocab_size=290,
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    control_symbols=["<turn>"],
    hard_vocab_limit=False,
    minloglevel=2,
  )
  return pathlib.Path(f"{prefix}.model").read_bytes()


def test_a_tokenizer_model_has_one_id_for_each_control_and_added_token(model_file, tmp_path):
  (tmp_path / "tokenizer.model").write_bytes(model_file)
  plain = of_folder(tmp_path, bos_token_id=1, eos_token_id=2)
  turn, hi = 3, plain.encode("hi", special=False)
  assert plain.piece(turn) == "<turn>"
  assert plain.encode("hi<turn>hi</s>") == [1, *hi, turn, *hi, 2]
  count = plain.vocab
  write(
    tmp_path,
    added_tokens={"<|im_end|>": count + 1, "<tool>": count + 2},
    tokenizer_config={"add_bos_token": False, "eos_token": "<|im_end|>"},
  )
  found = of_folder(tmp_path)
  assert found.encode("hi<tool>hi<|im_end|>") == [*hi, count + 2, *hi, count + 1]
  assert found.decode(found.encode("hi<tool> hi<|im_end|>")) == "hi<tool>  hi"
  assert (found.eos, found.vocab, found.pieces) == ((count + 1,), count + 3, count)
  assert found.piece(count) == ""
  again = reading.from_state(found.state())
  assert again.encode("hi<tool>") == found.encode("hi<tool>")
  # Without `legacy`, a space is put before the first text alone.
  write(tmp_path, tokenizer_config={"add_bos_token": False, "legacy": False})
  assert of_folder(tmp_path).encode("hi<tool> hi") == [*hi, count + 2, *hi]
  for legacy in (True, False):
    config = {"add_bos_token": False, "legacy": legacy, "add_prefix_space": False}
    write(tmp_path, tokenizer_config=config)
    found = of_folder(tmp_path)
    assert found.encode("hi") != hi
    assert found.encode(" hi<tool> hi") == [*hi, count + 2, *hi]
    assert found.decode(found.encode("hi hi")) == "hi hi"
  write(tmp_path, added_tokens={"<x>": 5})
  with pytest.raises(ValueError, match="id of its own"):
    of_folder(tmp_path)


def test_added_text_is_no_bytes_in_a_sequence_of_decoders_either():
  model = of_words(["éé"], [USER_DEFINED]).model
  model.decoder = library.decoders.Sequence([library.decoders.ByteLevel()])
  found = reading.JsonTokenizer(model, None, [])
  assert found.decode(found.encode("hiéé é")) == "hiéé é"


def test_a_stream_keeps_the_space_of_a_word_after_a_token():
  tokens = ["<unk>", "<s>", "</s>", "<eot>", "▁hello", "▁world"]
  types = [UNKNOWN, CONTROL, CONTROL, CONTROL, NORMAL, NORMAL]
  pieces = of_gguf(model="llama", tokens=tokens, token_type=types, scores=[0.0] * 6)
  strips = library.Tokenizer(library.models.WordLevel({t: n for n, t in enumerate(tokens)}))
  strips.add_special_tokens(["<s>", "</s>", "<eot>"])
  decoders = library.decoders
  strips.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
  )
  for found in (pieces, reading.JsonTokenizer(strips, 1, [2])):
    for ids in ([4, 3, 5, 3, 5], [3, 3, 3, 3, 3, 3, 3, 4, 5]):
      for cut in range(len(ids)):
        stream = TextStream(found, [1, *ids[:cut]])
        text = "".join([stream.push(token) for token in ids[cut:]] + [stream.finish()])
        before = found.decode([1, *ids[:cut]])
        assert before + text == found.decode([1, *ids])
