"""Do the real corpora have the published counts?"""

import pytest

from vqjax.lab.data import PennTreebank, WikiText, WordTokenizer, encode_split, fit_encoder
from vqjax.lab.data.source import SPLITS


def test_lines_are_read_one_by_one(tmp_path):
  for split in SPLITS:
    (tmp_path / f"{split}.txt").write_bytes("\ufeffa\r\n\n b\u2028c\x0cd \né".encode())
  assert list(WikiText(str(tmp_path)).documents("test")) == ["a", "", "b\u2028c\x0cd", "é"]


def test_a_byte_that_is_no_utf8_is_named_by_its_place(tmp_path):
  for split in SPLITS:
    (tmp_path / f"{split}.txt").write_bytes(b"first\nsec\xffond\n")
  with pytest.raises(
    ValueError, match=r"train\.txt must be UTF-8; got byte 0xff at offset 9\. Convert"
  ):
    list(WikiText(str(tmp_path)).documents("train"))


PUBLISHED = {
  PennTreebank: ("ptb", 10_000, (929_589, 73_760, 82_430)),
  WikiText: ("wikitext-2", 33_278, (2_088_628, 217_646, 245_569)),
}


@pytest.mark.parametrize("corpus", PUBLISHED)
def test_tokens_and_vocabulary_are_as_published(corpus, real_data):
  folder, vocab, tokens = PUBLISHED[corpus]
  if not (real_data / folder).is_dir():
    pytest.skip(f"no {folder} in {real_data}")
  source = corpus(str(real_data / folder))
  encoder = fit_encoder(source, WordTokenizer(split=False))
  splits = [encode_split(source, encoder, split) for split in SPLITS]
  assert encoder.vocab == vocab
  assert tuple(len(split.tokens) for split in splits) == tokens
