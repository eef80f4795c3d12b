"""Generation: a compiled pass over the prompts, and a compiled loop over tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from vqjax.lm.generation import speculation
from vqjax.lm.generation.kv_cache import Cache, Ring, Variables, decode, prefill, unstacked
from vqjax.lm.generation.sampling import UNFILTERED, Sampling, choose
from vqjax.lm.generation.speculation import Drafter
from vqjax.lm.generation.text_stream import TextStream, stop_tokens
from vqjax.lm.models import Transformer
from vqjax.lm.models.rotary import LongRope
from vqjax.lm.tokenizers.reading import Tokenizer
from vqjax.ops.vocab_parallel import own_promotion

__all__ = ["Generated", "generate", "stream"]

Prompts = Sequence[Sequence[int] | str]
"""Tokens of each prompt, or texts where a tokenizer is given."""

STOP_CHUNK = 16
"""Tokens that are generated between searches for stop strings."""

SMALLEST_BUCKET = 16
"""Tokens to which the shortest prompts are padded."""

CACHE_STEP = 256
"""Multiple of which the positions of a larger cache are."""


class Generated(NamedTuple):
  """Continuations of prompts.

  Attributes:
    tokens: the tokens, the stop token included; -1 after the end.
    lengths: number of tokens of each continuation.
    log_probs: log-probability of each token in nats, of the model's distribution before any option
      of `Sampling`; 0 after the end. None: not computed.
    texts: the text of each continuation, before a stop string; None without a tokenizer.
    passes: number of passes of the model that each row took part in, that over the prompt included;
      None without a drafter.
  """

  tokens: Int[np.ndarray, "B T"]
  lengths: Int[np.ndarray, "B"]
  log_probs: Float[np.ndarray, "B T"] | None
  texts: list[str] | None
  passes: Int[np.ndarray, "B"] | None = None


def generate(
  model: Transformer,
  variables: Variables,
  prompts: Prompts,
  key: PRNGKeyArray,
  sampling: Sampling = UNFILTERED,
  *,
  max_tokens: int,
  stop: Sequence[int | str] | None = None,
  tokenizer: Tokenizer | None = None,
  allowed: Bool[ArrayLike, "..."] | None = None,
  log_probs: bool = True,
  drafter: Drafter | None = None,
) -> Generated:
  """Continue each prompt until a stop token, a stop string or `max_tokens`.

  One program reads the prompts, padded to a power of two, and one runs the loop; both are compiled
  for a batch size, a size of the cache and the options. The result is a function of the key.

  For example:

      model, variables, tokenizer = checkpoints.load("Llama-3.2-1B")
      generated = generate(
        model, variables, ["Once upon a time"], jax.random.key(0), Sampling(temperature=0.8),
        max_tokens=100, tokenizer=tokenizer,
      )

  Args:
    model: the decoder, with any head.
    variables: its variables; those of `unstacked` save a copy of the blocks in each call.
    prompts: at least one token each, of any lengths.
    key: source of randomness.
    sampling: the distribution of the tokens.
    max_tokens: largest number of tokens of a continuation.
    stop: tokens, and with a tokenizer strings, that end a continuation; None: those with which the
      tokenizer ends a text. A string that is a control token, such as "<|im_end|>", is that token.
    tokenizer: encodes prompts and decodes continuations. Rows of the table for which it has no
      token are never drawn.
    allowed: marks the tokens that may be generated, [V] or [B, V]; None: all.
    log_probs: compute log-probabilities, which takes a second pass over the head where tokens are
      not the most likely ones.
    drafter: proposes tokens, which the model verifies several at a time, such as a `Draft`, an
      `Eagle` or a `Medusa`. The distribution of the result is the same unless the drafter is
      `Typical`, and greedy results are equal up to rounding; other draws differ from those without
      a drafter.

  Raises:
    ValueError: a prompt is empty or too long for the context, a token is outside the vocabulary,
      the tokenizer is of another size, no token is allowed, the drafter does not fit the model, or
      the scores are not finite.
    TypeError: the model is no Transformer, or the drafter no Drafter.
  """
  run = _Run(model, prompts, sampling, max_tokens, stop, tokenizer, allowed, log_probs, drafter)
  chunks = run.chunks(variables, key, STOP_CHUNK if run.stop_strings else max_tokens)
  for _ in chunks:
    pass
  return run.generated()


def stream(
  model: Transformer,
  variables: Variables,
  prompts: Prompts,
  key: PRNGKeyArray,
  sampling: Sampling = UNFILTERED,
  *,
  max_tokens: int,
  tokenizer: Tokenizer,
  stop: Sequence[int | str] | None = None,
  allowed: Bool[ArrayLike, "..."] | None = None,
  chunk: int = 4,
  drafter: Drafter | None = None,
) -> Iterator[list[str]]:
  """Yield the text of `generate` in pieces, a list with one for each prompt at a time.

  The pieces of a prompt, joined, are its text in `generate` with the same key. A piece ends with a
  whole character; it is empty where there is nothing new.

  Args:
    model: as in `generate`.
    variables: as in `generate`.
    prompts: as in `generate`.
    key: as in `generate`.
    sampling: as in `generate`.
    max_tokens: as in `generate`.
    tokenizer: as in `generate`.
    stop: as in `generate`.
    allowed: as in `generate`.
    chunk: tokens that are generated at a time; more of them cost less, and arrive later.
    drafter: as in `generate`. Where a stop string ends a row of several, the others may be drawn
      otherwise than there.
  """
  if chunk < 1:
    raise ValueError(f"`chunk` must be at least 1; got {chunk}. 4 is usual.")
  run = _Run(model, prompts, sampling, max_tokens, stop, tokenizer, allowed, False, drafter)
  return run.chunks(variables, key, chunk)


class _State(NamedTuple):
  """What the loop carries; M is the size of the results.

  Attributes:
    rings: the caches of the blocks, and of memories.
    step: number of tokens so far, less one: that of the token in `token`.
    token: the latest token of each row.
    length: number of tokens of each prompt.
    done: whether a row has ended.
    tokens: the tokens so far; -1 elsewhere.
    log_probs: their log-probabilities; None: not computed.
    seen: the tokens of prompt and text, for the repetition penalty; None: not needed.
  """

  rings: tuple[Cache, ...]
  step: Int[Array, ""]
  token: Int[Array, "B"]
  length: Int[Array, "B"]
  done: Bool[Array, "B"]
  tokens: Int[Array, "B M"]
  log_probs: Float[Array, "B M"] | None
  seen: Bool[Array, "B V"] | None


@dataclasses.dataclass(frozen=True)
class _Program:
  """What the compiled functions depend on, beside the shapes of arrays."""

  model: Transformer
  sampling: Sampling
  capacity: int
  has_log_probs: bool
  rejected: int
  returns_hidden: bool

  def with_next(self, variables, state, hidden_BD, key, step, stop, allowed) -> _State:
    """The state with the token that follows final hidden vectors, as number `step`."""

    def of_head(model):
      head, best = model.head, self.sampling.is_greedy and not self.sampling.penalizes
      if best and allowed is None and self.has_log_probs:
        log_prob_B1, token_B1 = head.top_k(hidden_BD, 1)
        return token_B1[:, 0], log_prob_B1[:, 0]
      drawn_B = choose(
        head, hidden_BD, jax.random.fold_in(key, step), self.sampling, allowed, state.seen
      )
      # The log-probability of -1 would be nan.
      score = lambda: head.log_prob(hidden_BD, jnp.maximum(drawn_B, 0))
      return drawn_B, score() if self.has_log_probs else None

    token_B, log_prob_B = self.model.apply(variables, method=of_head)
    broken_B = jnp.isnan(hidden_BD).any(-1)
    if self.has_log_probs:
      broken_B |= jnp.isnan(log_prob_B)
    token_B = jnp.where(broken_B, -1, token_B)
    write = lambda array_BM, new_B, old: array_BM.at[:, step].set(jnp.where(state.done, old, new_B))
    rows, fed_B = jnp.arange(len(token_B)), jnp.maximum(token_B, 0)
    return state._replace(
      step=step,
      token=fed_B,
      # A row without a token has ended; the host explains it.
      done=state.done | (token_B[:, None] == stop).any(1) | (token_B < 0),
      tokens=write(state.tokens, token_B, -1),
      log_probs=write(state.log_probs, log_prob_B, 0.0) if self.has_log_probs else None,
      seen=None if state.seen is None else state.seen.at[rows, fed_B].set(True),
    )


@functools.partial(jax.jit, static_argnames="program")
@own_promotion
def _begin(
  variables, tokens_BT, length_B, key, stop, allowed, *, program: _Program
) -> tuple[_State, Float[Array, "B T D"] | None]:
  """The state after the prompts and the first token of each row.

  Also the final hidden vectors of the prompts, if the program returns them.
  """
  model, batch, hidden_BTD = program.model, len(length_B), None
  given = model, variables, tokens_BT, length_B, program.capacity, program.rejected
  if program.returns_hidden:
    hidden_BTD, rings = prefill(*given, all_positions=True)
    hidden_BD = jnp.take_along_axis(hidden_BTD, (length_B - 1)[:, None, None], axis=1)[:, 0]
  else:
    hidden_BD, rings = prefill(*given)
  seen_BV = None
  if program.sampling.penalizes:
    is_padding_BT = jnp.arange(tokens_BT.shape[1]) >= length_B[:, None]
    marked_BT = jnp.where(is_padding_BT, model.head.vocab, tokens_BT)
    seen_BV = jnp.zeros((batch, model.head.vocab), bool)
    seen_BV = seen_BV.at[jnp.arange(batch)[:, None], marked_BT].set(True, mode="drop")
  empty_BM = jnp.full((batch, program.capacity), -1, jnp.int32)
  state = _State(
    rings=rings,
    step=jnp.zeros((), jnp.int32),
    token=empty_BM[:, 0],
    length=length_B,
    done=jnp.zeros(batch, bool),
    tokens=empty_BM,
    log_probs=jnp.zeros(empty_BM.shape, jnp.float32) if program.has_log_probs else None,
    seen=seen_BV,
  )
  state = program.with_next(variables, state, hidden_BD, key, state.step, stop, allowed)
  return state, hidden_BTD


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
@own_promotion
def _continue(variables, state, limit, key, stop, allowed, *, program: _Program) -> _State:
  """The state once there are `limit` tokens, or all rows have ended."""

  def step(state):
    hidden_BD, rings = decode(
      program.model, variables, state.rings, state.token, state.length, state.step
    )
    state = state._replace(rings=rings)
    return program.with_next(variables, state, hidden_BD, key, state.step + 1, stop, allowed)

  return lax.while_loop(lambda state: (state.step + 1 < limit) & ~state.done.all(), step, state)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
@own_promotion
def _read_again(
  variables, state, tokens_BT, length_B, key, stop, allowed, *, program: _Program
) -> _State:
  """The state with another token, from caches of the whole texts so far."""
  given = program.model, variables, tokens_BT, length_B, program.capacity
  hidden_BD, caches = prefill(*given)
  # The slot of a position is counted from the end of the prompt.
  turn = lambda ring: jax.tree.map(lambda x: jnp.roll(x, state.step + 1, axis=1), ring)
  rings = tuple(turn(cache) if isinstance(cache, Ring) else cache for cache in caches)
  state = state._replace(rings=rings)
  return program.with_next(variables, state, hidden_BD, key, state.step + 1, stop, allowed)


class _Run:
  """A call of `generate` or `stream`: its checked arguments, and what the host keeps."""

  def __init__(
    self, model, prompts, sampling, max_tokens, stop, tokenizer, allowed, log_probs, drafter
  ):
    check_decoder(model)
    if drafter is not None:
      model.check_keys_suffice()
    if max_tokens < 1:
      raise ValueError(f"`max_tokens` must be at least 1; got {max_tokens}. Raise it.")
    self.max_tokens = max_tokens
    self.prompts = encoded(prompts, model.head.vocab, tokenizer, name="prompts")
    longest = max(map(len, self.prompts))
    if longest + max_tokens > model.context:
      fits = max(0, model.context - longest)
      raise ValueError(
        f"`prompts` with `max_tokens` more must have at most context {model.context} tokens; got"
        f" {longest} and {max_tokens}. Cut the prompt, or generate at most {fits}."
      )
    if stop is None:
      stop = () if tokenizer is None else tuple(tokenizer.eos)
    strings = tuple(entry for entry in stop if isinstance(entry, str))
    if strings and (tokenizer is None or "" in strings):
      raise ValueError(
        "`stop` must have tokens, or strings that are not empty and a tokenizer to find them; got"
        f" {list(stop)} {'without a' if tokenizer is None else 'and a'} tokenizer. Give both, or no"
        " string."
      )
    tokens = [entry for entry in stop if not isinstance(entry, str)]
    named = {entry: stop_tokens(tokenizer, entry) for entry in strings}
    self.stop_strings = tuple(entry for entry, (_, is_text) in named.items() if is_text)
    tokens += [token for controls, _ in named.values() for token in controls]
    # No token is -2, which keeps the array from being empty.
    self.stop = np.array(tokens or [-2], np.int32)
    self.allowed = None if allowed is None else np.asarray(allowed)
    if tokenizer is not None:
      self.allowed = with_pieces(self.allowed, tokenizer, model.head.vocab)
    if self.allowed is not None and not self.allowed.any(axis=-1).all():
      row = "" if self.allowed.ndim == 1 else f" in row {int(self.allowed.any(-1).argmin())}"
      raise ValueError(
        f"`allowed` must mark a token of the vocabulary; got none{row}. Mark at least one, such as"
        " the one that ends a text."
      )
    capacity, rejected = _cache_size(model, longest + max_tokens), 0
    self.drafter, self.speculation = drafter, None
    self.turns = _turns(model, self.prompts, max_tokens)
    if drafter is not None and self.turns:
      raise ValueError(
        "`drafter` must be None where a text becomes longer than the"
        f" {model.rotary.scaling.context} tokens after which its angles are others; got one, and"
        f" prompts of up to {longest} tokens with {max_tokens} more. Leave it out."
      )
    if drafter is not None:
      if not isinstance(drafter, speculation.Drafter):
        raise TypeError(
          f"`drafter` must be a Drafter; got a {type(drafter).__name__}. A small model drafts as"
          " Draft(model, variables)."
        )
      self.speculation = drafter.program(model, sampling, longest + max_tokens, log_probs)
      rejected = self.speculation.rejected
    reads_hidden = self.speculation is not None and self.speculation.reads_hidden
    self.program = _Program(model, sampling, capacity, log_probs, rejected, reads_hidden)
    self.texts = None
    if tokenizer is not None:
      self.texts = [TextStream(tokenizer, prompt, self.stop_strings) for prompt in self.prompts]
    self.lengths = np.zeros(len(self.prompts), np.int32)
    self.log_probs = self.passes = None

  def chunks(self, variables: Variables, key: PRNGKeyArray, chunk: int) -> Iterator[list[str]]:
    """Generate, and yield the pieces of text after the first token and after each chunk."""
    variables, given = unstacked(variables), (key, self.stop, self.allowed)
    tokens_BT, length_B = padded(self.prompts, self.program.model.context)
    state, hidden_BTD = _begin(variables, tokens_BT, length_B, *given, program=self.program)
    advance = functools.partial(_continue, program=self.program)
    if self.drafter is not None:
      state, advance = self._speculative(variables, state, tokens_BT, hidden_BTD)
    ended = False
    while not ended:
      pieces, done_B, count = self._read(state)
      ended = done_B.all() or count == self.max_tokens
      if ended and self.texts is not None:
        pieces = [piece + text.finish() for piece, text in zip(pieces, self.texts)]
      yield pieces
      if not ended:
        state = state._replace(done=jnp.asarray(done_B))
        if count in self.turns:
          tokens_B = [
            [*p, *np.maximum(t[:count], 0).tolist()] for p, t in zip(self.prompts, self.tokens)
          ]
          texts = padded(tokens_B, self.program.model.context)
          state = _read_again(variables, state, *texts, *given, program=self.program)
          continue
        limit = min(self.max_tokens, count + chunk, *(turn for turn in self.turns if turn > count))
        state = advance(variables, state, np.int32(limit), *given)

  def _speculative(self, variables, state, tokens_BT, hidden_BTD):
    """The first state, and the function that continues it, with a drafter."""
    program = self.speculation
    arrays = self.drafter.arrays(variables, program.part, program.model.head.vocab)
    state, length = speculation.begin(
      state, arrays, tokens_BT, hidden_BTD, program=program, capacity=self.program.capacity
    )
    self.speculation = dataclasses.replace(program, length=int(length))

    def advance(variables, state, limit, *given):
      while True:
        state, better = speculation.advance(
          variables, arrays, state, limit, self.max_tokens, *given, program=self.speculation
        )
        if int(better) == self.speculation.length:
          return state
        self.speculation = dataclasses.replace(self.speculation, length=int(better))

    return state, advance

  def _read(self, state: _State | speculation.State) -> tuple[list[str], np.ndarray, int]:
    """The new pieces of text, the rows that have ended, and the tokens of the shortest other."""
    self.tokens = np.asarray(state.tokens)[:, : self.max_tokens].copy()
    self.log_probs = state.log_probs
    self.passes = getattr(state, "passes", None)
    done_B = np.asarray(state.done).copy()
    count_B = np.broadcast_to(np.asarray(state.step) + 1, done_B.shape)
    pieces = [""] * len(self.prompts)
    for row in range(len(self.prompts)):
      text = self.texts[row] if self.texts else None
      for token in self.tokens[row, self.lengths[row] : count_B[row]].tolist():
        if self._has_ended(row):
          break
        if token < 0:
          raise ValueError(
            f"`variables` must give finite scores; got nan after prompt {row}. Use a model whose"
            " training did not diverge."
          )
        self.lengths[row] += 1
        if text and token not in self.stop:
          pieces[row] += text.push(token)
      done_B[row] |= text is not None and text.stopped
    return pieces, done_B, int(count_B[~done_B].min(initial=self.max_tokens))

  def _has_ended(self, row: int) -> bool:
    if self.texts and self.texts[row].stopped:
      return True
    length = self.lengths[row]
    return bool(length > 0 and self.tokens[row, length - 1] in self.stop)

  def generated(self) -> Generated:
    """The result, once all chunks are there."""
    kept_BT = np.arange(self.max_tokens) < self.lengths[:, None]
    log_probs = self.log_probs
    if log_probs is not None:
      log_probs = np.where(kept_BT, np.asarray(log_probs)[:, : self.max_tokens], 0)
    texts = self.texts and [text.text for text in self.texts]
    passes = None if self.passes is None else np.asarray(self.passes)
    return Generated(np.where(kept_BT, self.tokens, -1), self.lengths, log_probs, texts, passes)


def _turns(model: Transformer, prompts: list[list[int]], max_tokens: int) -> set[int]:
  """Numbers of tokens after which a text has become so long that its angles are others.

  All of it is read again then, as in transformers: cached keys and values are of the old angles.
  """
  if model.rotary is None or not isinstance(model.rotary.scaling, LongRope):
    return set()
  turns = {model.rotary.scaling.context + 1 - len(prompt) for prompt in prompts}
  return {turn for turn in turns if 0 < turn < max_tokens}


def check_decoder(model: Transformer) -> None:
  """Raise TypeError unless a model is the general decoder."""
  if not isinstance(model, Transformer):
    raise TypeError(
      f"`model` must be a vqjax.lm.models.Transformer; got a {type(model).__name__}. Only the"
      " general decoder has a cache of keys and values."
    )


def encoded(
  texts: Prompts, vocab: int, tokenizer: Tokenizer | None, *, name: str
) -> list[list[int]]:
  """The tokens of each text.

  Raises:
    ValueError: there are no texts, one is empty or has a token outside the vocabulary, or the
      tokenizer has more tokens than the vocabulary.
  """
  if isinstance(texts, str) or not len(texts):
    raise ValueError(f"`{name}` must be a list of at least one; got {texts!r}. Write [text].")
  # Added tokens may be without a row, such as those of images in a model of text.
  pieces = 0 if tokenizer is None else tokenizer.pieces
  if pieces > vocab:
    raise ValueError(
      f"`tokenizer` must have at most the model's {vocab} tokens; got {pieces}. Use the tokenizer"
      " that belongs to the weights."
    )
  rows = []
  for number, text in enumerate(texts):
    if isinstance(text, str) and tokenizer is None:
      raise ValueError(
        f"`{name}` must be tokens without a tokenizer; got {text!r}. Give `tokenizer`."
      )
    row = [int(token) for token in (tokenizer.encode(text) if isinstance(text, str) else text)]
    if not row or min(row) < 0 or max(row) >= vocab:
      got = f"{min(row)} to {max(row)}" if row else f"none for {text!r}"
      raise ValueError(
        f"`{name}` must have at least one token each, in [0, {vocab}); got {got} in number"
        f" {number}. A text needs a token to follow: begin with that of BOS."
      )
    rows.append(row)
  return rows


def with_pieces(
  allowed: Bool[np.ndarray, "..."] | None, tokenizer: Tokenizer, vocab: int
) -> Bool[np.ndarray, "..."] | None:
  """`allowed` without the rows of a padded table, for which the tokenizer has no token."""
  rest = range(min(tokenizer.pieces, vocab), vocab)
  is_known = lambda token: token < tokenizer.vocab and bool(tokenizer.piece(token))
  padding = [token for token in rest if not is_known(token) and token not in tokenizer.eos]
  if not padding:
    return allowed
  if allowed is None:
    allowed = np.ones(vocab, bool)
  if allowed.shape[-1:] == (vocab,):  # another shape is refused where it is used
    allowed = allowed.copy()
    allowed[..., padding] = False
  return allowed


def padded(rows: list[list[int]], context: int) -> tuple[np.ndarray, np.ndarray]:
  """Rows of tokens, padded with 0 to a power of two or the context, and their lengths."""
  lengths = np.array([len(row) for row in rows], np.int32)
  width = min(context, max(SMALLEST_BUCKET, 1 << int(lengths.max() - 1).bit_length()))
  tokens = np.zeros((len(rows), width), np.int32)
  for number, row in enumerate(rows):
    tokens[number, : len(row)] = row
  return tokens, lengths


def _cache_size(model: Transformer, positions: int) -> int:
  """Number of positions of a cache: a few sizes, so that few programs are compiled."""
  if positions > CACHE_STEP:
    return min(model.context, -(-positions // CACHE_STEP) * CACHE_STEP)
  return min(model.context, max(SMALLEST_BUCKET, 1 << (positions - 1).bit_length()))
