"""Do the real corpora have the published counts?"""

import pytest

from vqjax.data import PennTreebank, WikiText, WordTokenizer, encode_split, fit_encoder
from vqjax.data.source import SPLITS

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
