"""Hashes of n-grams of tokens: the rows of a table that the last tokens of a text read.

A table of n-grams has no row for each of V^n n-grams, but a few million, which a hash chooses. Each
head hashes the last two, three, ... tokens by its own modulus, so that few n-grams share all rows.
The hashes are those of published models, of 64-bit integers. NumPy computes them as such. Compiled
programs compute them as two words of 32 bits, equal bit for bit, whether JAX has 64 bits or not.
"""

# ids [*B, T, H] of tokens [*B, T]
#
#   _shifted        [n, *B, T]     the token, the one before, ...
#   numbers         64-bit words   a number for each length of n-gram
#   remainders      [*B, T, H]     modulo the heads' sizes; a head's rows follow those of the others

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer, UInt32

from vqjax.ops.vocab_parallel import on_any_axes
from vqjax.ops.vocabulary import host_array, in_vocabulary, is_count

__all__ = ["CanonicalHash", "NGramHash", "PolynomialHash", "XorHash", "count_rows", "readings"]

LARGEST = 2**31 - 1
"""Largest number of rows: ids are int32."""

TOKENS = 2**16
"""Tokens of a text that are hashed at a time."""

Tokens = Integer[np.ndarray, "*B T"] | Integer[Array, "*B T"]
Previous = Integer[np.ndarray, "*B P"] | Integer[Array, "*B P"]
Ids = Int[np.ndarray, "*B T H"] | Int[Array, "*B T H"]


@runtime_checkable
class NGramHash(Protocol):
  """A hash of n-grams.

  Attributes:
    vocab: number of tokens, V.
    sizes: rows of each head; those of a head follow those of the heads before it.
    pad: the token that stands where there is none.
    order: length of the longest n-gram, n.
    heads: number of rows that a token reads, H.
    rows: number of rows of the table.
  """

  vocab: int
  sizes: tuple[int, ...]
  pad: int

  @property
  def order(self) -> int: ...

  @property
  def heads(self) -> int: ...

  @property
  def rows(self) -> int: ...

  def __call__(self, tokens: Tokens, previous: Previous | None = None) -> Ids:
    """The rows of every token, [*B, T, H]; `previous` are the n - 1 tokens before, [*B, n - 1]."""


class _Hash:
  """What the hashes share: the tokens before a token, and the rows of heads behind each other."""

  @property
  def rows(self) -> int:
    """Number of rows of the table: the heads' sizes together."""
    return sum(self.sizes)

  @property
  def heads(self) -> int:
    """Number of rows that a token reads, H."""
    return len(self.sizes)

  def __call__(self, tokens: Tokens, previous: Previous | None = None) -> Ids:
    """The rows of every token.

    Args:
      tokens: [*B, T]. NumPy arrays are hashed by NumPy.
      previous: the tokens before, [*B, order - 1], such as those of an earlier call in decoding.
        None: `pad`, as at the beginning of a text.

    Returns:
      int32 [*B, T, H], in [0, rows). In a compiled program the rows of an n-gram with a token
      outside the vocabulary are -1.

    Raises:
      ValueError: the tokens or `previous` are not integers of these shapes, or, in NumPy, a token
        is outside the vocabulary.
    """
    if isinstance(tokens, jax.Array) or isinstance(previous, jax.Array):
      hashed = lambda given: self._hashed(*given, jnp)
      return on_any_axes(hashed, (tokens, previous), jnp.asarray(tokens))
    return self._hashed(tokens, previous, np)

  def _checked(self, tokens, previous, xp):
    tokens = xp.asarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer) or tokens.ndim < 1:
      raise ValueError(
        f"`tokens` must be integers [*B, T]; got {tokens.dtype} {tokens.shape}. Give token ids."
      )
    before, wanted = self.order - 1, (*tokens.shape[:-1], self.order - 1)
    previous = xp.asarray(xp.full(wanted, self.pad, np.int32) if previous is None else previous)
    if not np.issubdtype(previous.dtype, np.integer) or previous.shape != wanted:
      raise ValueError(
        f"`previous` must be integers {wanted}, the {before} tokens before; got {previous.dtype}"
        f" {previous.shape}. Fill with {self.pad} where there are none."
      )
    return tokens, previous

  def _hashed(self, tokens, previous, xp):
    before = self.order - 1
    tokens, previous = self._checked(tokens, previous, xp)
    (was_known, previous), (is_known, tokens) = (self._known(x) for x in (previous, tokens))
    shifted = self._shifted(xp.concatenate([previous, tokens], axis=-1), xp)
    words = _Wide if xp is np else _Pair
    columns = [self._remainders(shifted[:n], sizes, words) for n, sizes in self._of_lengths()]
    offsets = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int32)
    ids = xp.concatenate(columns, axis=-1)[..., before:, :].astype(np.int32) + offsets
    if xp is np:
      return ids
    known = jnp.concatenate([was_known, is_known], axis=-1)
    length = tokens.shape[-1]
    parts = (known[..., i : i + length] for i in range(before + 1))
    return jnp.where(functools.reduce(jnp.logical_and, parts)[..., None], ids, -1)

  def _known(self, tokens):
    if isinstance(tokens, jax.Array):
      return in_vocabulary(tokens, self.vocab)
    known = (tokens >= 0) & (tokens < self.vocab)
    if not known.all():
      raise ValueError(
        f"`tokens` must be in [0, {self.vocab}); got {tokens[~known].flat[0]}. Use the hash of the"
        " tokenizer's vocabulary."
      )
    return known, tokens.astype(np.int64)

  def _of_lengths(self) -> Iterator[tuple[int, Sequence[int]]]:
    each = len(self.sizes) // (self.order - 1)
    for length in range(2, self.order + 1):
      yield length, self.sizes[(length - 2) * each : (length - 1) * each]

  def _shifted(self, history, xp) -> list:
    """The token, the one before it, and so on; `pad` where there is none."""
    found = [history]
    length = history.shape[-1]
    position = xp.arange(length)  # a length may be a symbol
    start = None
    if self.end is not None:
      # The first token of a text: that after the last end before the token.
      ends = xp.where(history == self.end, position, -1)
      last = np.maximum.accumulate(ends, -1) if xp is np else jax.lax.cummax(ends, ends.ndim - 1)
      start = xp.concatenate([xp.full_like(last[..., :1], -1), last[..., :-1]], -1) + 1
    for shift in range(1, self.order):
      earlier = history[..., xp.maximum(position - shift, 0)]
      is_there = position >= shift
      if start is not None:
        is_there = is_there & (position - start >= shift)
      found.append(xp.where(is_there, earlier, self.pad))
    return found


@dataclasses.dataclass(frozen=True)
class XorHash(_Hash):
  """(t0 m0) xor (t1 m1) xor ..., modulo each head's size; t0 is the token, t1 the one before.

  Heads of equally long n-grams differ by their size alone, a prime number. Engram (DeepSeek, arXiv
  2601.07372, Section 2.2) and `qwen4_exp` of transformers hash like this.

  Attributes:
    vocab: number of tokens, V.
    multipliers: m0, m1, ... of the token and of those before it, below 2^63 / V.
    sizes: rows of each head, those of pairs first.
    pad: the token that stands where there is none.
    end: the token that ends a text: a token reads `pad` for what is before its text. None: texts
      are read through.
    seed: what the multipliers were drawn with; None: they are not drawn.
  """

  vocab: int
  multipliers: tuple[int, ...]
  sizes: tuple[int, ...]
  pad: int = 0
  end: int | None = None
  seed: int | None = None

  def __post_init__(self):
    _check(self, len(self.multipliers))
    largest = (2**63 - 1) // max(self.vocab - 1, 1)
    if not all(0 < m <= largest for m in self.multipliers):
      raise ValueError(
        f"`multipliers` must be in [1, {largest}], so that products with tokens below {self.vocab}"
        f" have 63 bits; got {self.multipliers}."
      )

  @property
  def order(self) -> int:
    """Length of the longest n-gram, n."""
    return len(self.multipliers)

  @classmethod
  def qwen4(
    cls,
    vocab: int,
    end: int,
    *,
    layer: int = 0,
    order: int = 3,
    heads: int = 8,
    least: int = 20_000_000,
    seed: int = 1234,
  ) -> XorHash:
    """The hash of a layer of `qwen4_exp`.

    Args:
      vocab: number of tokens, V (`vocab_size`).
      end: the token that ends a text (`eos_token_id`).
      layer: number of the layer among those that have a table, from 0.
      order: length of the longest n-gram (`ngram_size`).
      heads: heads of n-grams of each length (`heads_per_ngram`).
      least: smallest size of a head (`ngram_vocab_size_base`).
      seed: of the multipliers (`seed`).
    """
    _check_order(order, heads, vocab)
    _check_base("least", least)
    _check_token("end", end, vocab)
    if not is_count(layer) or layer < 0:
      raise ValueError(
        f"`layer` must be an integer of at least 0; got {layer}. Count layers that have a table."
      )
    count = (order - 1) * heads
    primes = _primes_from(least, (layer + 1) * count)
    base = seed + 10007 * layer
    half = max(1, (2**63 - 1) // vocab // 2)
    multipliers = (2 * (_splitmix64(base + _GAMMA * (i + 1)) % half) + 1 for i in range(order))
    return cls(vocab, tuple(multipliers), tuple(primes[-count:]), pad=end, end=end, seed=seed)

  @classmethod
  def engram(
    cls,
    vocab: int,
    sizes: Sequence[int],
    *,
    pad: int,
    layers: Sequence[int] = (0,),
    layer: int = 0,
    heads: int = 8,
    seed: int = 0,
  ) -> XorHash:
    """The hash of a layer of Engram.

    Tokens are canonical ids, those of pieces that read alike, which `CanonicalHash` takes from a
    tokenizer's. Multipliers and sizes are those of the authors' demonstration.

    Args:
      vocab: number of canonical ids.
      sizes: smallest size of a head of pairs, of triples, and so on.
      pad: the canonical id of the padding token.
      layers: numbers of all layers that have a table, whose sizes differ.
      layer: the number of this layer, one of `layers`.
      heads: heads of n-grams of each length.
      seed: of the multipliers.

    Raises:
      ValueError: `layer` is none of `layers`, or a size is out of range.
    """
    order = len(sizes) + 1
    _check_order(order, heads, vocab)
    for least in sizes:
      _check_base("sizes", least)
    if layer not in layers:
      raise ValueError(f"`layer` must be one of `layers` {tuple(layers)}; got {layer}.")
    taken: set[int] = set()
    for other in layers:
      own: list[int] = []
      for least in sizes:
        start = least
        for _ in range(heads):
          prime = next(p for p in _primes(start) if p not in taken)
          taken.add(prime)
          own.append(prime)
          start = prime + 1
      if other == layer:
        break
    half = max(1, (2**63 - 1) // vocab // 2)
    drawn = np.random.default_rng(seed + 10007 * layer).integers(0, half, order, dtype=np.int64)
    return cls(vocab, tuple(2 * int(m) + 1 for m in drawn), tuple(own), pad=pad, seed=seed)

  def _remainders(self, shifted, sizes, words):
    mixed = words.product(shifted[0], self.multipliers[0])
    for token, multiplier in zip(shifted[1:], self.multipliers[1:]):
      mixed = words.xor(mixed, words.product(token, multiplier))
    return words.remainders(mixed, sizes)


@dataclasses.dataclass(frozen=True)
class PolynomialHash(_Hash):
  """t0 + t1 V + t2 V^2 + ..., modulo each head's size; t0 is the token, t1 the one before.

  The rolling hash of LongCat-Flash-Lite (arXiv 2601.21204, Section 3); not compared with the
  authors' program. A head of pairs as large as V^2 has a row for each pair.

  Attributes:
    vocab: number of tokens, V.
    order: length of the longest n-gram, n.
    sizes: rows of each head, those of pairs first.
    pad: the token that stands where there is none.
    end: as of `XorHash`.
  """

  vocab: int
  order: int
  sizes: tuple[int, ...]
  pad: int = 0
  end: int | None = None

  def __post_init__(self):
    _check(self, self.order)

  def _remainders(self, shifted, sizes, words):
    columns = []
    for size in sizes:
      total, power = None, 1
      for token in shifted:
        term = words.remainders(words.product(token, power), [size])[..., 0]
        # Two remainders are below 2^32.
        total = term if total is None else words.remainder_of_sum(total, term, size)
        power = power * self.vocab % size
      columns.append(total)
    stack = np.stack if words is _Wide else jnp.stack
    return stack(columns, -1)


@dataclasses.dataclass(frozen=True)
class CanonicalHash(_Hash):
  """A hash of n-grams of canonical ids: tokens that read alike are one.

  Source: Engram (arXiv 2601.07372), Section 2.2. `vqjax.lm.tokenizers.canonical_ids` gives the ids
  of a tokenizer.

  Example:
    >>> from vqjax.ops.ngrams import CanonicalHash, XorHash
    >>> of = CanonicalHash(XorHash.engram(3, [101], pad=0, heads=2), ids=(0, 1, 2, 1))
    >>> bool((of([1, 2, 1]) == of([3, 2, 3])).all())
    True

  Attributes:
    hash: the hash of canonical ids.
    ids: the canonical id of each token, [V].
  """

  hash: XorHash | PolynomialHash
  ids: tuple[int, ...] = dataclasses.field(repr=False)

  def __post_init__(self):
    ids = host_array("ids", self.ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
      raise ValueError(
        f"`ids` must be the canonical ids of all tokens, [V]; got {ids.dtype} {ids.shape}. Take"
        " them from canonical_ids(tokenizer)."
      )
    if ids.min() < 0 or ids.max() >= self.hash.vocab:
      raise ValueError(
        f"`ids` must be in [0, {self.hash.vocab}), the canonical ids of the hash; got"
        f" {ids.min()} to {ids.max()}. Make the hash with vocab={ids.max() + 1}."
      )
    if self.hash.pad not in ids:
      raise ValueError(
        f"`ids` must have the hash's `pad`, {self.hash.pad}; no token has it. Give the canonical id"
        " of a token."
      )
    object.__setattr__(self, "ids", tuple(ids.tolist()))

  def __hash__(self) -> int:
    return self._hash_value

  @functools.cached_property
  def _hash_value(self) -> int:
    # Every call of a compiled program asks for it.
    return hash((self.hash, self.ids))

  @functools.cached_property
  def _table(self) -> Int[np.ndarray, "V"]:
    return np.asarray(self.ids, np.int32)

  @property
  def vocab(self) -> int:
    """Number of tokens, V."""
    return len(self.ids)

  @property
  def sizes(self) -> tuple[int, ...]:
    """Rows of each head."""
    return self.hash.sizes

  @functools.cached_property
  def pad(self) -> int:
    """The first token whose canonical id is the hash's `pad`."""
    return self.ids.index(self.hash.pad)

  @property
  def order(self) -> int:
    """Length of the longest n-gram, n."""
    return self.hash.order

  def _hashed(self, tokens, previous, xp):
    tokens, previous = self._checked(tokens, previous, xp)
    return self.hash._hashed(self.canonical(tokens), self.canonical(previous), xp)

  def canonical(self, tokens: Tokens) -> Tokens:
    """The canonical ids of tokens [*B, T]; in a compiled program -1 outside the vocabulary."""
    if isinstance(tokens, jax.Array):
      return on_any_axes(self._of_known, tokens, tokens)
    return self._table[self._known(tokens)[1]]

  def _of_known(self, tokens):
    known, tokens = self._known(tokens)
    return jnp.where(known, jnp.asarray(self._table)[tokens], -1)


def _check(given, order):
  sizes = tuple(given.sizes)
  object.__setattr__(given, "sizes", sizes)  # a list could not be hashed, as programs need
  _check_order(order, len(sizes) // max(order - 1, 1), given.vocab)
  if len(sizes) % (order - 1):
    raise ValueError(
      f"`sizes` must hold as many heads for each of the {order - 1} lengths of n-grams; got"
      f" {len(sizes)}. Give a multiple of {order - 1}."
    )
  if not all(is_count(size) and size >= 2 for size in sizes) or sum(sizes) > LARGEST:
    raise ValueError(
      f"`sizes` must be integers of at least 2, and {LARGEST} in all; got {sizes}. Ids of rows are"
      " int32."
    )
  _check_token("pad", given.pad, given.vocab)
  if given.end is not None:
    _check_token("end", given.end, given.vocab)


def _check_order(order, heads, vocab):
  if not is_count(order) or order < 2:
    raise ValueError(f"n-grams must have at least 2 tokens; got {order}. 3 is usual.")
  if not is_count(heads) or heads < 1:
    raise ValueError(
      f"each length of n-grams must have at least 1 head; got {heads}. 8 heads are usual."
    )
  if not is_count(vocab) or not 1 <= vocab <= LARGEST:
    raise ValueError(
      f"`vocab` must be an integer in [1, {LARGEST}]; got {vocab}. Give the tokenizer's size."
    )


def _check_base(name, least):
  if not is_count(least) or not 2 <= least <= LARGEST:
    raise ValueError(
      f"`{name}` must be whole and in [2, {LARGEST}], the smallest size of a head; got {least}."
      " 20_000_000 is that of qwen4_exp."
    )


def _check_token(name, token, vocab):
  if not is_count(token) or not 0 <= token < vocab:
    raise ValueError(
      f"`{name}` must be a token in [0, {vocab}); got {token}. Give one of the tokenizer's, such as"
      " one that no text has."
    )


class _Wide:
  """64-bit integers of NumPy."""

  @staticmethod
  def product(token, multiplier):
    return token.astype(np.uint64) * np.uint64(multiplier)

  @staticmethod
  def xor(a, b):
    return a ^ b

  @staticmethod
  def remainders(number, sizes):
    return (number[..., None] % np.asarray(sizes, np.uint64)).astype(np.int64)

  @staticmethod
  def remainder_of_sum(a, b, size):
    return (a + b) % size


class _Word(NamedTuple):
  """A 64-bit integer as two of 32 bits."""

  high: Array
  low: Array


class _Pair:
  """64-bit integers as two words, for programs of JAX without 64 bits."""

  @staticmethod
  def product(token, multiplier):
    token = token.astype(jnp.uint32)
    low, high = np.uint32(multiplier & 0xFFFFFFFF), np.uint32(multiplier >> 32 & 0xFFFFFFFF)
    return _Word(_high_word(token, low) + token * high, token * low)

  @staticmethod
  def xor(a, b):
    return _Word(a.high ^ b.high, a.low ^ b.low)

  @staticmethod
  def remainders(number, sizes):
    size = np.asarray(sizes, np.uint32)
    high, low = number.high[..., None], number.low[..., None]

    # A size has at most 31 bits, so that the doubled remainder has 32.
    def with_bit(i, found):
      found = found << 1 | (low >> (31 - jnp.uint32(i)) & 1)
      return jnp.where(found >= size, found - size, found)

    return jax.lax.fori_loop(0, 32, with_bit, high % size).astype(jnp.int32)

  @staticmethod
  def remainder_of_sum(a, b, size):
    return ((a.astype(jnp.uint32) + b.astype(jnp.uint32)) % np.uint32(size)).astype(jnp.int32)


def _high_word(a, b):
  """The upper 32 bits of a product of 32-bit integers, by halves."""
  a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
  middle = (a0 * b0 >> 16) + (a0 * b1 & 0xFFFF) + (a1 * b0 & 0xFFFF)
  return a1 * b1 + (a0 * b1 >> 16) + (a1 * b0 >> 16) + (middle >> 16)


_GAMMA, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def _splitmix64(value: int) -> int:
  value = (value + _GAMMA) & _MASK
  value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
  value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
  return value ^ (value >> 31)


def _primes(start: int) -> Iterator[int]:
  """The prime numbers from `start` on, a block at a time by the sieve of Eratosthenes."""
  start = max(start, 2)
  while True:
    block = max(1024, int(start**0.5) // 4)
    root = int((start + block) ** 0.5) + 1
    small = np.ones(root + 1, bool)
    small[:2] = False
    for i in range(2, int(root**0.5) + 1):
      if small[i]:
        small[i * i :: i] = False
    is_prime = np.ones(block, bool)
    for prime in np.flatnonzero(small):
      first = max(prime * prime, -(-start // prime) * prime)
      is_prime[first - start :: prime] = False
    yield from (start + np.flatnonzero(is_prime)).tolist()
    start += block


def _primes_from(start: int, count: int) -> list[int]:
  numbers = _primes(start)
  return [next(numbers) for _ in range(count)]


def count_rows(
  of: NGramHash,
  tokens: Tokens | Iterable[Any],
  rows: int | None = None,
) -> UInt32[np.ndarray, "V"]:
  """How often texts read each row of a table, uint32 [rows].

  Args:
    of: the hash of the table.
    tokens: a text [T], which may be mapped from a file; texts of one length, [*B, T]; or any texts
      one after the other. Some of their tokens are hashed at a time.
    rows: number of rows of the table, at least those of the hash; None: as many.

  Raises:
    ValueError: the table has fewer rows than the hash, or a token is outside the vocabulary.
  """
  rows = of.rows if rows is None else rows
  if rows < of.rows:
    raise ValueError(
      f"`rows` must be at least those of the hash, {of.rows}; got {rows}. Give the hash of this"
      " table."
    )
  counts, before = np.zeros(rows, np.uint32), of.order - 1
  for texts in [tokens] if isinstance(tokens, np.ndarray | jax.Array) else tokens:
    texts = host_array("tokens", texts)
    if not texts.ndim:
      raise ValueError(
        f"`tokens` must be a text [T], or several; got the number {texts}. Give an array of ids."
      )
    if not texts.size:
      continue
    length = texts.shape[-1]
    texts, some = texts.reshape(-1, length), max(1, TOKENS // length)
    for block in (texts[i : i + some] for i in range(0, len(texts), some)):
      history = np.full((len(block), before), of.pad)
      for first in range(0, length, TOKENS):
        own = block[:, first : first + TOKENS]
        found, times = np.unique(of(own, history), return_counts=True)
        counts[found] += times.astype(np.uint32)
        # Of int64, which unsigned tokens of 64 bits would not be.
        history = np.concatenate([history, own], axis=1)[:, own.shape[1] :].astype(np.int64)
  return counts


class Reading(NamedTuple):
  """How a text uses the rows of a head.

  Attributes:
    rows: rows of the head.
    used: rows that the text reads.
    ngrams: different n-grams of the text.
    shared: n-grams that share their row with another one.
    entropy: of the rows that the tokens read, bits.
  """

  rows: int
  used: int
  ngrams: int
  shared: int
  entropy: float


def readings(of: XorHash | PolynomialHash | CanonicalHash, tokens: Tokens) -> list[Reading]:
  """Load, collisions and entropy of every head, for a text [T] or texts [*B, T]."""
  tokens = np.asarray(tokens)
  if isinstance(of, CanonicalHash):
    of, tokens = of.hash, of.canonical(tokens)
  ids = of(tokens).reshape(-1, of.heads)
  before = of.order - 1
  history = np.concatenate([np.full((*tokens.shape[:-1], before), of.pad), tokens], axis=-1)
  shifted = [x[..., before:].ravel() for x in of._shifted(history, np)]
  found, head = [], 0
  for length, sizes in of._of_lengths():
    ngrams, which = np.unique(np.stack(shifted[:length], -1), axis=0, return_inverse=True)
    for size in sizes:
      row = np.zeros(len(ngrams), np.int64)
      row[which.ravel()] = ids[:, head]
      _, times = np.unique(row, return_counts=True)
      counts = np.unique(ids[:, head], return_counts=True)[1]
      share = counts / max(tokens.size, 1)
      found.append(
        Reading(
          rows=size,
          used=len(times),
          ngrams=len(ngrams),
          shared=int(times[times > 1].sum()),
          entropy=float((share * np.log2(1 / share)).sum()),
        )
      )
      head += 1
  return found
