"""Tokenizers that people have: those of model folders and of GGUF, llama2.c and other files."""

from vqjax.lm.tokenizers.reading import (
  Tokenizer,
  canonical_ids,
  check_size,
  from_pieces,
  from_state,
  load_tokenizer,
)

__all__ = [
  "Tokenizer",
  "canonical_ids",
  "check_size",
  "from_pieces",
  "from_state",
  "load_tokenizer",
]
