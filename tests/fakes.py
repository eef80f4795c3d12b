"""Tokenizers for tests that need few words or letters."""


class FakeTokenizer:
  """What most tests do not need of a tokenizer, `vqjax.lm.tokenizers.Tokenizer`."""

  bos, eos = None, ()
  pieces = property(lambda self: self.vocab)

  def decode(self, tokens):
    return " ".join(map(str, tokens))

  def piece(self, token):
    return self.decode([token])

  def state(self):
    return type(self).__name__


class FewWords(FakeTokenizer):
  """A tokenizer of the words `words`, of which the first is the end and the second unknown."""

  bos, eos = 0, (0,)

  def __init__(self, *words):
    self.words, self.vocab = ("<eos>", "<unk>", *words), 2 + len(words)

  def encode(self, text, *, special=True):
    ids = [self.words.index(word) if word in self.words else 1 for word in text.split()]
    return [0, *ids] if special else ids

  def decode(self, tokens):
    return " ".join(self.words[token] for token in tokens if token)

  def piece(self, token):
    return self.words[token]
