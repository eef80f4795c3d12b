"""Words that are single tokens, for measurements of several studies."""

from collections.abc import Sequence

from vqjax.lm.tokenizers import Tokenizer


def single_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> dict[str, int]:
  """The token of each word that is one known token."""
  tokens = {}
  for word in words:
    encoded = tokenizer.encode(word, special=False)
    if len(encoded) == 1 and tokenizer.decode(encoded).strip() == word:
      tokens[word] = encoded[0]
  return tokens
