"""Loading of pretrained decoders, tensor by tensor, and saving of decoders for other libraries."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from vqjax import tables
from vqjax.convert.trained_variables import Variables
from vqjax.embeddings import DenseEmbedding, Embedding
from vqjax.heads import DenseHead, Head
from vqjax.lm.checkpoints.runtime import Runtime, runtime_of
from vqjax.lm.models import Transformer
from vqjax.lm.records import shown
from vqjax.lm.sources.families import Family, described, family_of
from vqjax.lm.sources.layout import Layout
from vqjax.lm.sources.quantised import dequantised
from vqjax.lm.sources.readers import (
  ModelSource,
  Tensor,
  _some,
  open_source,
  verify_tensor,
)
from vqjax.lm.sources.rules import Rule
from vqjax.lm.tokenizers.reading import (
  JsonTokenizer,
  PiecesTokenizer,
  Tokenizer,
  check_size,
  find_tokenizer,
)
from vqjax.outputs import new_output
from vqjax.sharding import shardings
from vqjax.tables.container import SEPARATOR
from vqjax.tables.tensor_files import DTYPES, NARROW, release, save_file
from vqjax.types import Dtype

__all__ = ["Loaded", "decoder", "load", "read_variables", "save"]

BLOCK = 2**22
"""Numbers of a table that are read, dequantised and cast at a time."""


class Loaded(NamedTuple):
  """A pretrained model.

  Attributes:
    model: the decoder.
    variables: its variables, an argument of `model.apply`. Give them to a jitted function as an
      argument too: arrays that it closes over are constants, which compile for minutes.
    tokenizer: the tokenizer; None: there is none beside the weights.
  """

  model: Transformer
  variables: Variables
  tokenizer: Tokenizer | None


def decoder(
  path: str | pathlib.Path,
  *,
  dtype: Dtype = jnp.float32,
  head: Head | None = None,
  embedding: Embedding | None = None,
  **fields: Any,
) -> Transformer:
  """The decoder of a model, without its weights.

  Args:
    path: a folder with config.json and safetensors, a GGUF, or a .bin file of llama2.c.
    dtype: dtype of the computation and of the dense vocabulary layers.
    head: another head; None: the dense one, tied or not as in the file.
    embedding: another embedding; None: that to which `head` is tied, or else a dense one.
    fields: further fields of the decoder, such as `remat`.
  """
  model = open_source(path).decoder(dtype)
  return _with_layers(model, head, embedding).clone(**fields)


def _with_layers(model: Transformer, head: Head | None, embedding: Embedding | None) -> Transformer:
  tied = getattr(head, "embedding", None)
  if tied is not None and embedding is not None and tied is not embedding:
    raise ValueError(
      "`embedding` must be that of `head`, which is tied; got another object. Give one of them."
    )
  if head is None and embedding is not None and model.head.embedding is not None:
    head = model.head.clone(embedding=None)
  return model.clone(head=head or model.head, embedding=embedding or tied or model.embedding)


def load(
  path: str | pathlib.Path,
  *,
  dtype: Dtype = jnp.float32,
  head: Head | None = None,
  embedding: Embedding | None = None,
  mesh: Mesh | None = None,
  seed: int = 0,
  runtime: Runtime | None = None,
  tokenizer: bool = True,
  memory_tables: Mapping[int, tables.SmallTable | str | os.PathLike[str]] | None = None,
) -> Loaded:
  """Load a pretrained decoder, its variables and its tokenizer.

  Example:

    model, variables, tokenizer = load("Llama-3.2-1B")
    logits = jax.jit(model.apply)(variables, jnp.array([tokenizer.encode("Hello")]))

  Args:
    path: a folder with config.json and safetensors, a GGUF, or a .bin file of llama2.c.
    dtype: dtype of the variables and of the computation; bfloat16 takes half the memory.
    head: a head instead of the loaded one, freshly initialised; a dense one gets the loaded rows.
    embedding: an embedding instead of the loaded one, likewise; a tied head brings its own.
    mesh: devices over which the variables are sharded by `vqjax.sharding.RULES`, each of which
      reads its part only; None: the default device.
    seed: seed of the layers that are freshly initialised.
    runtime: form of the vocabulary tables in memory, one of `checkpoints.RUNTIMES`; None: that
      which the file names, dense rows in most. Not with a head or an embedding.
    tokenizer: read the tokenizer too; False: it is None, for one that this library cannot read.
    memory_tables: tables of n-gram memories that are read in place of the folder's, by the number
      of the block, from 0. Those that `vqjax compress FOLDER:TENSOR --pages` writes stay in their
      files.

  Raises:
    FileNotFoundError: there is no such model, or it has no weights.
    ValueError: the architecture is unknown, tensors are missing, unknown or of a wrong shape, a
      file is damaged, the tokenizer has another size, or the tables cannot have the form.
  """
  source = open_source(path)
  own = source.decoder(dtype)
  if runtime is not None and (head or embedding):
    raise ValueError(
      "`runtime` must be None with a `head` or an `embedding`; got both. Give one of them."
    )
  if head is None and embedding is None:
    found = variable_sources(source, own)
    names = [name for name in ("embedding", "head") if (name, "weight") in found]
    stored = {name: found[name, "weight"].tensors[0][1] for name in names}
    made = (runtime or runtime_of(source.runtime)).layers(own, stored)
    model, ready = own.clone(embedding=made.embedding, head=made.head), dict(made.variables)
  else:
    model, ready = _with_layers(own, head, embedding), {}
  arrays = traverse_util.flatten_dict(ready)
  if memory_tables:
    model, of_tables = _with_tables(model, memory_tables)
    arrays |= of_tables
  read, places = _read(source, own, model, dtype, mesh)
  read |= {path: jax.device_put(array, places[path]) for path, array in arrays.items()}
  if fresh := places.keys() - read.keys():
    read |= _initialised(model, fresh, places, seed)
  variables = traverse_util.unflatten_dict(read)
  reading = find_tokenizer(source) if tokenizer else None
  if reading is not None:
    check_size(reading, own.head.vocab, source.path)
  return Loaded(model, variables, reading)


def _with_tables(
  model: Transformer, given: Mapping[int, tables.SmallTable | str | os.PathLike[str]]
) -> tuple[Transformer, dict[tuple[str, ...], np.ndarray]]:
  """The model with other tables of its memories, and their variables by paths.

  Args:
    model: the decoder.
    given: the tables by the number of the block, from 0.

  Raises:
    ValueError: a block has no memory, or the table is that of another one.
  """
  blocks = list(model.memory_blocks)
  if unknown := sorted(set(given) - set(blocks)):
    raise ValueError(
      f"`memory_tables` must be those of the blocks {blocks}; got one of block {unknown[0]}. Count"
      " blocks from 0."
    )
  memories, arrays = list(model.memories), {}
  for block, table in given.items():
    number = blocks.index(block)
    lookup = memories[number].lookup
    small = table if isinstance(table, tables.SmallTable) else tables.SmallTable.load(table)
    if small.shape != (lookup.table.vocab, lookup.table.dim):
      raise ValueError(
        f"the table of block {block} must be {(lookup.table.vocab, lookup.table.dim)}, by the"
        f" config; got {small.shape}. Give that of this block."
      )
    embedding, variables = small.to_embedding()
    memories[number] = memories[number].clone(lookup=lookup.clone(table=embedding))
    for (collection, *rest), array in traverse_util.flatten_dict(variables).items():
      arrays[collection, f"memories_{number}", "lookup", "table", *rest] = array
  return model.clone(memories=tuple(memories)), arrays


def read_variables(
  path: str | pathlib.Path, model: Transformer, *, mesh: Mesh | None = None
) -> Variables:
  """The variables of `model` that are those of a file; fresh layers are left out.

  Args:
    path: the model's folder or file.
    model: a decoder with the body of the file's, such as `decoder(path, head=...)`.
    mesh: as in `load`.

  Raises:
    ValueError: the body of `model` is not that of the file; further errors as of `load`.
  """
  source = open_source(path)
  own = source.decoder(model.dtype)
  if differing := [name for name in BODY if getattr(own, name) != getattr(model, name)]:
    shown = ", ".join(
      f"{name} {getattr(model, name)}, which is {getattr(own, name)} there" for name in differing
    )
    raise ValueError(
      f"`model` must be the decoder of {path}; got {shown}. Make it with"
      " checkpoints.decoder(path, head=...)."
    )
  read, _ = _read(source, own, model, model.dtype, mesh)
  return traverse_util.unflatten_dict(read)


BODY = (
  *("dim", "layers", "heads", "norm", "attention", "mlp", "post_norms", "rotary", "local_rotary"),
  *("window", "local", "turned", "pre_norms", "branch_scale", "embedding_scale", "final_scale"),
  *("streams", "delta", "recurrent", "memories", "memory_blocks"),
)
"""Fields of a decoder that its body computes with."""


INTEGERS = {name for name, dtype in DTYPES.items() if np.dtype(dtype).kind in "iub"}
NOT_WEIGHTS = frozenset(INTEGERS | NARROW.keys())
"""Number formats that weights do not have, except with scales."""


class VariableSource(NamedTuple):
  """A variable of a decoder, and the tensors that hold it: one, or one for each block or expert.

  Attributes:
    rule: where it is.
    shape: its shape.
    tensors: the names and the tensors, whole.
    stacked: number of its leading axes whose entries have tensors of their own.
    rows: the rows of a tensor that are the variable's; the others are of variables that it joins.
    columns: the entries of its last axis that are, likewise.
  """

  rule: Rule
  shape: tuple[int, ...]
  tensors: list[tuple[str, Tensor]]
  stacked: int
  rows: slice = slice(None)
  columns: slice = slice(None)


def variable_sources(
  source: ModelSource, model: Transformer
) -> dict[tuple[str, ...], VariableSource]:
  """The parts of a model by the paths of its variables, all checked against its shapes.

  Raises:
    ValueError: tensors are missing, unknown, or of a shape that contradicts the config.
  """
  family = family_of(source.config)
  tensors = _without_prefix(source, family)
  shapes = traverse_util.flatten_dict(_abstract(model)["params"])
  rules = {tuple(rule.path.split("/")): rule for rule in family.rules}
  placed = {path: _place(path, model) for path in shapes}
  # A file of another architecture that calls itself this one.
  if unknown := {path for path, (of, _) in placed.items() if of not in rules}:
    raise ValueError(
      f"`model_type` {family.model_type} has no rule for {_some(sorted(map('/'.join, unknown)))}."
      " Its config asks for what the architecture lacks: check config.json."
    )
  found, missing, used = {}, [], set()
  for path, struct in shapes.items():
    of, block = placed[path]
    rule, stacked = rules[of], rules[of].stacked_axes(source.kind) - len(block)
    # A config may ask for more tensors than can be counted; one more than there are is missing.
    numbers = itertools.islice(np.ndindex(struct.shape[:stacked]), len(tensors) + 1)
    names = [rule.tensor_name(source.kind).format(*block, *number) for number in numbers]
    used |= {*names}
    missing += [name for name in names if name not in tensors]
    own = [(name, tensors[name]) for name in names if name in tensors]
    found[path] = VariableSource(rule, struct.shape, own, stacked)
  tied = {rules["head", "weight"].tensor_name(source.kind)} if model.head.embedding else set()
  extra = [
    name
    for name in tensors.keys() - used - tied
    if not name.startswith(family.ignored) and not name.endswith(family.ignored)
  ]
  if missing or extra:
    lines = [f"lacks {_some(missing)}"] if missing else []
    lines += [f"has {_some(sorted(extra))}, which the config does not ask for"] if extra else []
    remedy = "Use the config and the weights of one model."
    raise ValueError(
      f"{source.path} must have the tensors of its config, a {family.model_type} of"
      f" {model.layers} blocks; it {' and '.join(lines)}. {_unwrapping(extra) or remedy}"
    )

  _check_hashes(source, model, tensors)

  def file_shape(path):
    part = found[path]
    return part.rule.tensor_layout(source.kind).file_shape(part.shape[part.stacked :])

  for path, part in found.items():
    expected = file_shape(path)
    if joined := part.rule.joined_with(source.kind):
      number = joined.index("/".join(placed[path][0]))
      if part.rule.interleaved:
        found[path] = part._replace(columns=slice(number, None, len(joined)))
        expected = (*expected[:-1], len(joined) * expected[-1])
      else:
        counts = [file_shape((path[0], *name.split("/")[1:]))[0] for name in joined]
        first = sum(counts[:number])
        found[path] = part._replace(rows=slice(first, first + expected[0]))
        expected = (sum(counts), *expected[1:])
    for name, tensor in part.tensors:
      if tensor.format in NOT_WEIGHTS:
        raise ValueError(
          f"{name} of {source.path} must have a format of floating-point numbers, or one of a GGUF;"
          f" got {tensor.format}. Use the original weights."
        )
      if tensor.shape != expected:
        raise ValueError(
          f"{name} of {source.path} must have shape {list(expected)}, by the config; got"
          f" {list(tensor.shape)}. Use the config and the weights of one model."
        )
  return found


WRAPPERS = {
  "_orig_mod.": "torch.compile",
  "module.": "DataParallel",
  "_fsdp_wrapped_module.": "FSDP",
  "base_model.model.": "PEFT",
}
"""What names of tensors begin with, after a module that was put around the model."""


def _unwrapping(names: list[str]) -> str | None:
  """What to do about names of a model that was saved inside of another module, if these are."""
  if any(".lora_A." in name or ".base_layer." in name for name in names):
    return "Merge the adapter of PEFT with merge_and_unload(), and save the model that it returns."
  for begin, wrapper in WRAPPERS.items():
    if all(name.startswith(begin) for name in names) and names:
      return f"Save the model that {wrapper} has wrapped, or remove {begin!r} from the names."
  return None


def _place(path: tuple[str, ...], model: Transformer) -> tuple[tuple[str, ...], tuple[int, ...]]:
  """The path of a variable's rule, and the number of its block if the path names one."""
  owner, _, number = path[0].rpartition("_")
  if owner == "blocks":
    return (owner, *path[1:]), (int(number),)
  if owner == "memories":
    return (owner, *path[1:]), (model.memory_blocks[int(number)],)
  return path, ()


def _check_hashes(source: ModelSource, model: Transformer, tensors: Mapping[str, Tensor]) -> None:
  """Raise ValueError unless the stored hashes of memories are those of the config."""
  for block, memory in zip(model.memory_blocks, model.memories):
    ngrams = memory.lookup.ngrams
    expected = {"layer_multipliers": ngrams.multipliers, "ngram_heads_vocab_sizes": ngrams.sizes}
    for name, numbers in expected.items():
      stored = tensors.get(f"layers.{block}.ple.ple_embedding.{name}")
      if stored is not None and (found := tuple(stored.read(slice(None)).tolist())) != numbers:
        raise ValueError(
          f"{source.path} must have the {name} of its config in block {block}, {shown(numbers)};"
          f" got {shown(found)}. Use the config.json of these tensors."
        )


def _without_prefix(source: ModelSource, family: Family) -> dict[str, Tensor]:
  """The tensors by the names of the rules, with quantised weights as numbers."""
  if source.kind != "safetensors":
    return dict(source.tensors)
  tensors = dequantised(source.path, source.config, source.tensors)
  bare = lambda name: name.removeprefix(family.prefix).removeprefix("language_model.")
  return {bare(name): tensor for name, tensor in tensors.items()}


@functools.lru_cache(maxsize=4)  # tracing takes as long as reading half a gigabyte
def _abstract(model: Transformer) -> Variables:
  """The shapes of a decoder's variables."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  init = lambda key, t: model.init(key, t, t, method="loss_terms")
  return jax.eval_shape(init, jax.random.key(0), tokens)


def _read(
  source: ModelSource, own: Transformer, model: Transformer, dtype: Dtype, mesh: Mesh | None
) -> tuple[dict[tuple[str, ...], jax.Array], dict[tuple[str, ...], Sharding]]:
  """The variables of `model` that the file's decoder `own` has too, and the places of all."""
  found = variable_sources(source, own)
  wanted = _abstract(model)
  flat, places = (
    traverse_util.flatten_dict(tree) for tree in (wanted, _shardings(model, wanted, mesh))
  )
  _read_ahead(source)
  read = {}
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    list(pool.map(lambda named: verify_tensor(*named, source.path), source.tensors.items()))
    for path, struct in flat.items():
      part = found.get(_loaded_path(path, own, model))
      if part is not None and part.shape == struct.shape:
        array = functools.partial(_array, source, part, dtype, pool)
        read[path] = jax.make_array_from_callback(struct.shape, places[path], array)
  return read, places


def _read_ahead(source: ModelSource) -> None:
  """Let the system read the files in order, before pages are touched in that of the variables."""
  if hasattr(os, "posix_fadvise"):
    for path in source.files:
      with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _loaded_path(path: tuple[str, ...], own: Transformer, model: Transformer) -> tuple[str, ...]:
  """The path below "params" of a variable of `model` in the file; () for none."""
  collection, owner, *_ = path
  layer = getattr(model, owner, None) if owner in ("head", "embedding") else None
  is_dense = layer is None or isinstance(layer, (DenseHead, DenseEmbedding))
  if collection != "params" or not is_dense:
    return ()
  # An untied head begins with the rows to which the file's head is tied.
  if path[1:] == ("head", "weight") and own.head.embedding is not None:
    return ("embedding", "weight")
  return path[1:]


def _initialised(
  model: Transformer,
  paths: set[tuple[str, ...]],
  places: Mapping[tuple[str, ...], Sharding],
  seed: int,
) -> dict[tuple[str, ...], jax.Array]:
  """Fresh variables at these paths; the others are not computed."""

  def init(key):
    tokens = jnp.zeros((1, 1), jnp.int32)
    variables = model.init(key, tokens, tokens, method="loss_terms")
    flat = traverse_util.flatten_dict(variables)
    return {path: flat[path] for path in paths}

  out = {path: places[path] for path in paths}
  return jax.jit(init, out_shardings=out)(jax.random.key(seed))


def _shardings(model: Transformer, wanted: Variables, mesh: Mesh | None) -> Any:
  if mesh is None:
    device = jax.config.jax_default_device or jax.local_devices()[0]
    one = SingleDeviceSharding(device) if isinstance(device, jax.Device) else device
    return jax.tree.map(lambda _: one, wanted)
  return shardings(model.logical_axes(), wanted, mesh)


def _array(
  source: ModelSource,
  part: VariableSource,
  dtype: Dtype,
  pool: ThreadPoolExecutor,
  index: tuple[slice, ...],
) -> np.ndarray:
  """The part of a variable that `index` selects, read from the file into new memory."""
  lengths = [len(range(*s.indices(n))) for s, n in zip(index, part.shape)]
  array = _aligned(lengths, jnp.dtype(dtype))
  layout = part.rule.tensor_layout(source.kind)
  offset = part.rule.gguf_offset if source.kind == "gguf" else 0.0
  stacked = part.stacked
  numbers = np.arange(len(part.tensors)).reshape(part.shape[:stacked])[index[:stacked]]
  pieces = [
    (array[at], part.tensors[number][1], part.rows) for at, number in np.ndenumerate(numbers)
  ]
  shape, index = part.shape[stacked:], index[stacked:]
  if is_cut := len(shape) > 1 and layout.keeps_rows and part.rows == slice(None):
    # A block of rows at a time, so that no second copy of a table or of all experts exists.
    pieces = [cut for piece in pieces for cut in _blocks_of_rows(*piece[:2], index[0])]
    index = (slice(None), *index[1:])

  def copy(piece):
    target, tensor, rows = piece
    values = tensor.read(rows)[..., part.columns]
    if is_cut:
      values = layout.variable(values, (len(target), *shape[1:]))[index]
    else:
      values = layout.variable(values, shape)[index]
    np.copyto(target, values - np.float32(offset) if offset else values, casting="unsafe")
    release(values)

  list(pool.map(copy, pieces))
  return array


def _blocks_of_rows(
  target: np.ndarray, tensor: Tensor, index: slice
) -> list[tuple[np.ndarray, Tensor, slice]]:
  """Parts of a variable, and the rows of the tensor that they hold."""
  first, last, _ = index.indices(tensor.shape[0])
  step = max(1, BLOCK // max(1, math.prod(tensor.shape[1:])))
  starts = range(first, last, step)
  cuts = [slice(row, min(row + step, last)) for row in starts]
  return [(target[cut.start - first : cut.stop - first], tensor, cut) for cut in cuts]


def _aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
  """Uninitialised memory that JAX takes over without a copy, which needs 64-byte alignment."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + 64, np.uint8)
  first = -memory.ctypes.data % 64
  return memory[first : first + size].view(dtype).reshape(shape)


SAVED_DTYPES = ("float32", "bfloat16", "float16")
"""Number formats of files that `save` writes."""


def save(
  folder: str | pathlib.Path,
  model: Transformer,
  variables: Variables,
  tokenizer: JsonTokenizer | PiecesTokenizer | None = None,
  *,
  dtype: Dtype | None = None,
  shard_bytes: int = 5 * 10**9,
) -> None:
  """Write a folder that Hugging Face transformers loads: config.json and safetensors.

  It is whole or not there.

  Args:
    folder: a folder that does not exist or is empty.
    model: a decoder of a known family, with a dense embedding and a dense head.
    variables: its variables.
    tokenizer: written as it was read.
    dtype: dtype of the written tensors; None: that of each variable.
    shard_bytes: largest size of a file, unless one tensor is larger.

  Raises:
    ValueError: no family computes the decoder, or the folder is not empty.
  """
  folder = pathlib.Path(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(f"`folder` must be new or empty; got {folder}. Give another one.")
  folder.absolute().parent.mkdir(parents=True, exist_ok=True)
  with new_output(folder, "folder", folder=True) as partial:
    write_folder(partial, model, variables, tokenizer, dtype=dtype, shard_bytes=shard_bytes)


def write_folder(
  folder: pathlib.Path,
  model: Transformer,
  variables: Variables,
  tokenizer: JsonTokenizer | PiecesTokenizer | None = None,
  *,
  dtype: Dtype | None = None,
  shard_bytes: int = 5 * 10**9,
  compressed: Mapping[str, Mapping[str, np.ndarray]] | None = None,
) -> dict[str, str]:
  """Write the files of `save` into a new folder, which the caller publishes.

  With compressed tables only this library loads it: what `entropy_coder.encode_table` returned for
  "embedding" or "head" is written in place of the table.

  Returns:
    The name of the tensor of each compressed table.
  """
  family, config = described(model)
  shapes = traverse_util.flatten_dict(_abstract(model)["params"])
  params = traverse_util.flatten_dict(dict(variables)["params"])
  if wrong := [p for p, s in shapes.items() if p not in params or params[p].shape != s.shape]:
    raise ValueError(
      f"`variables` must be those of `model`; got none, or another shape, for"
      f" {_some(sorted(map('/'.join, wrong)))}. Give the variables that belong to the model."
    )
  kind = jnp.dtype(dtype or jax.tree.leaves(params)[0].dtype)
  if kind.name not in SAVED_DTYPES:
    raise ValueError(
      f"`dtype` must be one of {', '.join(SAVED_DTYPES)}; got {kind.name}. Cast the variables."
    )
  folder.mkdir()
  files = ShardedFiles(folder, shard_bytes)
  tensors, held = {}, {}
  rules = {tuple(rule.path.split("/")): rule for rule in family.rules}
  order = {of: number for number, of in enumerate(rules)}
  for path in sorted(shapes, key=lambda path: (order[_place(path, model)[0]], path)):
    of, block = _place(path, model)
    rule, value = rules[of], params[path]
    layout = Layout(rule.layout)
    prefix = "" if rule.path.startswith("head/") else family.prefix
    if (table := (compressed or {}).get(path[0])) is not None and path[1] == "weight":
      tensors[path[0]] = prefix + rule.name
      for part, array in table.items():
        files.add(prefix + rule.name + SEPARATOR + part, array)
      continue
    axes = value.shape[: rule.stacked_axes("safetensors") - len(block)]
    for first in np.ndindex(axes[:1]):
      entry = np.asarray(jax.device_get(value[first]))
      for rest in np.ndindex(axes[1:]):
        tensor = layout.tensor(entry[rest]).astype(dtype or value.dtype)
        name = prefix + rule.name.format(*block, *first, *rest)
        parts = held.setdefault(name, []) if rule.joined else []
        parts.append(tensor)
        if len(parts) == max(1, len(rule.joined)):
          joined = np.concatenate(parts) if rule.joined else np.ascontiguousarray(tensor)
          if rule.interleaved:
            joined = np.stack(parts, axis=-1).reshape(*tensor.shape[:-1], -1)
          files.add(name, joined)
          parts.clear()
  files.finish()
  ends = {}
  if tokenizer is not None:
    eos = tokenizer.eos[0] if len(tokenizer.eos) == 1 else list(tokenizer.eos) or None
    ends = {"bos_token_id": tokenizer.bos, "eos_token_id": eos}
  # An end that the model computes with stays.
  text = json.dumps(ends | config | {"torch_dtype": kind.name}, indent=2)
  (folder / "config.json").write_text(text + "\n", "utf-8")
  if tokenizer is not None:
    tokenizer.save(folder)
  return tensors


class ShardedFiles:
  """Safetensors files of bounded size, with checksums, and their index."""

  def __init__(self, folder: pathlib.Path, most: int):
    self._folder, self._most = folder, most
    self._tensors: dict[str, np.ndarray] = {}
    self._written: list[tuple[pathlib.Path, list[str]]] = []
    self._bytes = 0

  def add(self, name: str, tensor: np.ndarray) -> None:
    held = sum(other.nbytes for other in self._tensors.values())
    if self._tensors and held + tensor.nbytes > self._most:
      self._write()
    self._tensors[name] = tensor

  def _write(self) -> None:
    path = self._folder / f"part-{len(self._written)}"
    save_file(self._tensors, path, {"format": "pt"})
    self._written.append((path, list(self._tensors)))
    self._bytes += sum(tensor.nbytes for tensor in self._tensors.values())
    self._tensors = {}

  def finish(self) -> None:
    """Write the rest, and give the files the names that transformers looks for."""
    self._write()
    count = len(self._written)
    if count == 1:
      self._written[0][0].rename(self._folder / "model.safetensors")
      return
    weights = {}
    for number, (path, names) in enumerate(self._written, start=1):
      name = f"model-{number:05}-of-{count:05}.safetensors"
      path.rename(self._folder / name)
      weights |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": self._bytes}, "weight_map": weights}
    text = json.dumps(index, indent=2)
    (self._folder / "model.safetensors.index.json").write_text(text + "\n", "utf-8")
