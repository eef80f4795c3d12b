"""Compressed folders: of pretrained models, and of tensors of any architecture."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import pathlib
import resource
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vqjax.lm import checkpoints, records
from vqjax.lm.checkpoints.loading import write_folder
from vqjax.lm.compression.calibration import SEED, collect, own_text, zipf_counts
from vqjax.lm.compression.decoder_tables import DecoderTables
from vqjax.lm.compression.exports import ROWS, NewTensor, copy_folder, rewrite_gguf, stored_tables
from vqjax.lm.compression.judging import (
  TABLES,
  Reference,
  check_finite,
  hardest,
  summary,
  tables_of,
  with_tables,
)
from vqjax.lm.jobs import ProgressBars, check_free, open_work, work_of
from vqjax.lm.sources import readers
from vqjax.lm.sources.readers import check_not_compressed
from vqjax.lm.texts import (
  WINDOW,
  TextWindows,
  check_tokens,
  check_window,
  counts_of,
  encode_texts,
  text_windows,
)
from vqjax.outputs import atomic_file, check_output, copied_file, new_output, publish, write_text
from vqjax.tables import Moments, byte_budget, container, gguf_types
from vqjax.tables.coded import SMOOTHING
from vqjax.tables.grids import check_rows
from vqjax.tables.moments import SHRINKAGE
from vqjax.tables.search import CLOSE_SIZE, Point, Tables, search
from vqjax.tables.tensor_files import NARROW

__all__ = ["read_moments"]

WORK_FORMAT = 3
"""Changes when work that was kept is no longer what would be computed."""


def read_moments(path: str | os.PathLike[str]) -> Moments:
  """Moments of a file; FileNotFoundError names it."""
  if not os.path.isfile(path):
    raise FileNotFoundError(
      f"`--moments` must be a file that Moments.save wrote; got {path}, which is not a file. Write"
      " it, or leave the option out."
    )
  return Moments.load(path)


@dataclasses.dataclass(frozen=True)
class CompressionJob:
  """A call of `compress_model`.

  Attributes:
    model: path of the pretrained model.
    texts: texts by the names of their domains; empty: the model writes its own.
    out: folder to be written.
    kl: bound of the divergence on calibration text, nats a token; or
    size: bound of the bytes of all tables.
    held_out: files of text of which nothing else is taken; empty: the last fifth of each text.
    moments: file of moments, whose counts are weighed like those of the texts; None: they are
      collected.
    hidden_tokens: tokens of the second moment of hidden states.
    search_tokens: tokens of calibration text on which a step is judged.
    held_out_tokens: tokens on which the result is judged.
    window: tokens of a window.
    dtype: number format in which the model is loaded.
    runtime: name of the form of the tables in memory, one of `checkpoints.RUNTIMES`.
    compares: compare with block types of GGUF.
  """

  model: pathlib.Path
  texts: Mapping[str, str]
  out: pathlib.Path
  kl: float | None = None
  size: int | None = None
  held_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
  moments: pathlib.Path | None = None
  hidden_tokens: int = 2**14
  search_tokens: int = 2**11
  held_out_tokens: int = 2**12
  window: int = WINDOW
  dtype: str = "float32"
  runtime: str = container.UNPACKED
  compares: bool = False

  def identity(self) -> str:
    """A hash of everything that the kept work depends on; the bound is not part of it."""
    facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    for name in ("kl", "size", "out", "search_tokens", "held_out_tokens", "compares"):
      del facts[name]
    # What another version computes may differ.
    facts["format"] = WORK_FORMAT
    if self.moments is not None:
      facts["moments"] = records.file_checksum(self.moments)
    files = sorted(self.model.iterdir()) if self.model.is_dir() else [self.model]
    facts["files"] = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()


@dataclasses.dataclass
class _PointRow:
  step: float
  bytes: int
  kl: float | None
  tokens: int


def compress_model(job: CompressionJob, loaded: Any, say: Callable[[str], None]) -> dict[str, Any]:
  """Compress the tables of a model into a folder that is whole or not there; return the report.

  What an interrupted call has computed is in a hidden folder beside `out`, from which the same
  call goes on.

  Args:
    job: what to do.
    loaded: the model, its variables and its tokenizer.
    say: prints a line.

  Raises:
    ValueError: the bound cannot be reached, a text has no known token, a number of the model is
      not finite, or the moments are those of another model.
    OSError: something is at `out`, or the disk has no room.
  """
  check_paths(job)
  begin = time.monotonic()
  model, variables, tokenizer = loaded
  runtime = checkpoints.RUNTIMES[job.runtime]
  runtime.check(model)
  # Moments of such a model are not finite either, which says less.
  for name, table in tables_of(model, variables).items():
    check_rows(table, name)
  check_finite(variables)
  work = work_of(job.out)
  source = readers.open_source(job.model)
  before = stored_tables(source, model)
  _check_smaller(job.size or 0, before, "--bytes")
  with open_work(work, job.identity()), ProgressBars() as bars:
    if job.texts:
      calibration, held_out, counts = _texts(job, tokenizer, model)
    else:
      first = _begin(source, tokenizer)
      calibration, held_out, counts = _own_texts(job, work, loaded, first, bars)
    moments = _moments(job, work, model, variables, calibration, counts, bars)
    compression = DecoderTables(model, variables, moments, job.runtime)
    tokens = job.search_tokens
    reference = None
    own = calibration.tokens.shape[1] - 2  # tokens of a window that are judged
    if job.kl is not None:
      some = calibration.take(-(-tokens // own))
      reference = Reference(model, variables, some)
    rows = work / "points.jsonl"
    read = records.read_json_rows(rows, _PointRow)
    known = [Point(r["step"], r["bytes"], r["kl"]) for r in read.rows if r["tokens"] == tokens]

    def measure(step: float) -> Point:
      point = compression.point(step, reference)
      read.checksums.append(_append(rows, point, tokens, read.checksums))
      value = "" if point.kl is None else f", KL {point.kl:.5f}"
      say(f"step {step:.4g}: {point.bytes:,} bytes{value}")
      return point

    best, points = search(
      measure,
      kl=job.kl,
      size=job.size,
      points=known,
      step=compression.made.first_step,
      limits=compression.made.limits,
    )
    step, tables, coded = compression.made.coded(best.step, job.size, bars("coding"))
    seconds = time.monotonic() - begin
    sizes = {name: sum(a.nbytes for a in parts.values()) for name, parts in coded.items()}
    _check_smaller(sum(sizes.values()), before, "--kl" if job.size is None else "--bytes")
    student = compression.variables_of(tables)
    del tables
    some = held_out.take(-(-job.held_out_tokens // own))
    judge = Reference(model, variables, some)
    (found,) = judge.compare([student], bars("held-out text"))
    del student
    beside = {}
    if job.compares:
      beside = _in_block_types(compression, judge, bars("block types of GGUF"))
    result = {
      "step": step,
      "tables": {
        name: {"shape": list(compression.made.tables[name].shape), "bytes": size}
        for name, size in sizes.items()
      },
      "bytes": sum(sizes.values()),
      "bytes_before": sum(tensor.nbytes for _, tensor in before.values()),
      "formats_before": sorted({tensor.format for _, tensor in before.values()}),
      "parts": {n: {part: a.nbytes for part, a in parts.items()} for n, parts in coded.items()},
      "calibration_kl": best.kl,
      "held_out": summary(found, some),
      "block_types": beside,
      "hardest": hardest(found, some, tokenizer),
      "points": [dataclasses.asdict(point) for point in points],
      "settings": _job_settings(job, moments),
      "seconds": round(seconds, 1),
      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    _write(job, work, source, loaded, coded, result)
  return result


def _check_smaller(
  size: int, before: Mapping[str, tuple[str, readers.Tensor]], option: str
) -> None:
  """Raise ValueError unless tables take fewer bytes than the model's files have of them."""
  own = sum(tensor.nbytes for _, tensor in before.values())
  if size >= own:
    formats = ", ".join(sorted({tensor.format for _, tensor in before.values()}))
    raise ValueError(
      f"`{option}` must give tables of less than the {own:,} bytes that they have in the file"
      f" ({formats}); got {size:,}. Give a larger divergence or fewer bytes, or keep the model."
    )


def _begin(source: readers.ModelSource, tokenizer: Any) -> list[int]:
  """The tokens that begin every text; those of the metadata where no tokenizer is known."""
  if tokenizer is not None:
    return list(tokenizer.encode(""))
  facts = {"bos": source.metadata.get("tokenizer.ggml.bos_token_id")}
  if source.kind == "safetensors":
    facts["bos"] = source.config.get("bos_token_id")
  return [facts["bos"]] if type(facts["bos"]) is int else []


OWN_TEXT = "its own text"
"""Name of the domain of text that a model wrote itself."""

OWN_WINDOW = 128
"""Most tokens of a window of such text: each takes a pass of the model."""

MOST_OWN_TOKENS = 2**13
"""Most tokens that a model writes itself: they take longer than reading so many."""


def _own_texts(job, work, loaded, begin, bars):
  """Windows to calibrate with and to judge by, and counts, of text that the model writes itself."""
  model, variables, tokenizer = loaded
  length = min(job.window, model.context, OWN_WINDOW)
  check_window(length)
  kept = work / "own_text.npy"
  if kept.is_file():
    tokens = np.load(kept)
  else:
    count = max(10 * length, min(job.hidden_tokens * 5 // 4, MOST_OWN_TOKENS))
    progress = bars("text of its own")
    tokens = own_text(
      model, variables, begin, count, length, tokenizer=tokenizer, progress=progress
    )
    with atomic_file(kept) as file:
      np.save(file, tokens)
  cut = len(tokens) * 4 // 5
  made = [
    TextWindows(some, np.zeros(len(some), np.int64), (OWN_TEXT,))
    for some in (tokens[:cut], tokens[cut:])
  ]
  vocab = model.head.vocab
  counts = np.bincount(made[0].tokens.ravel(), minlength=vocab).astype(np.float64)
  # So little text has few of the tokens: by rank, the others have a share too.
  share = zipf_counts(vocab)
  return *made, (counts + share * (counts.sum() / share.sum())) / 2


def _job_settings(job: CompressionJob, moments: Moments) -> dict[str, Any]:
  """What a result depends on beside the model, the texts and the bound."""
  return {
    "runtime": job.runtime,
    "calibration_tokens": moments.tokens,
    "search_tokens": job.search_tokens,
    "window": job.window,
    "dtype": job.dtype,
    "shrinkage": SHRINKAGE,
    "smoothing": SMOOTHING,
    "seed": None if job.moments else SEED,
  }


def check_paths(job: CompressionJob) -> None:
  """Raise an error unless the model can be compressed into the folder in this way.

  Raises:
    ValueError: the model is compressed already, or a bound, window or number is impossible.
    OSError: something is where the folder shall be, a file does not exist, or the disk has no room.
  """
  check_output(job.out, "--out", folder=True)
  if job.model.is_dir() or job.model.suffix == ".safetensors":
    check_not_compressed(readers.open_source(job.model))
  if (beside := job.model / "tokenizer_config.json").is_file():
    copied_file(beside)
  if (job.kl is None) == (job.size is None):
    raise ValueError("give either `--kl` or `--bytes`, and not both.")
  if job.kl is not None and not 0 < job.kl < math.inf:
    raise ValueError(f"`--kl` must be positive; got {job.kl:g}. 0.01 is usual.")
  if job.size is not None and job.size < 1:
    raise ValueError(f"`--bytes` must be positive; got {job.size}. Give such as 65MB.")
  check_window(job.window)
  check_tokens(job.hidden_tokens)
  if job.moments is not None:
    read_moments(job.moments)
  # What the tables take is exactly known when they are coded, minutes later.
  parts = checkpoints.inspect(job.model).parts
  copied = sum(part.bytes for part in parts if part.name not in TABLES)
  least = _least_bytes(job.size, sum(part.params for part in parts if part.name in TABLES))
  # Half a model that an interrupted call wrote is removed first.
  left = sum(file.stat().st_size for file in (work_of(job.out) / "model").glob("*"))
  check_free(job.out.absolute().parent, copied + least - left)


def _append(path, point, tokens, checksums):
  """Add a row to the points that are known; return its checksum."""
  row = records.sealed(
    dataclasses.asdict(point) | {"tokens": tokens}, checksums[-1] if checksums else ""
  )
  with open(path, "a", encoding="utf-8") as out:
    out.write(records.dumps(row))
  return row[records.CHECKSUM]


def _texts(job, tokenizer, model):
  """Windows to calibrate with, windows that are held out, and counts of tokens."""
  length = min(job.window, model.context)
  check_window(length)
  # The last fifth is a window at least.
  least = lambda own: own if job.held_out else 5 * own
  begin, ours = encode_texts(job.texts, tokenizer, length, least, "--text")
  if job.held_out:
    _, others = encode_texts(job.held_out, tokenizer, length, lambda own: own, "--held-out")
  else:
    cut = lambda tokens: len(tokens) * 4 // 5
    others = {name: tokens[cut(tokens) :] for name, tokens in ours.items()}
    ours = {name: tokens[: cut(tokens)] for name, tokens in ours.items()}
  counts = counts_of(ours, begin, model.head.vocab, length)
  made = [text_windows(side, begin, length) for side in (ours, others)]
  return made[0].take(len(made[0].tokens)), made[1], counts


def _moments(job, work, model, variables, calibration, counts, bars):
  if job.moments is not None:
    return _with_counts(read_moments(job.moments), counts)
  kept = work / "moments.safetensors"
  if kept.is_file():
    return Moments.load(kept)
  moments = collect(
    model,
    variables,
    calibration.tokens,
    counts,
    hidden_tokens=job.hidden_tokens,
    expected_tokens=job.hidden_tokens // 4,
    fisher_tokens=job.hidden_tokens // 16,
    cache=work / "sums.npz",
    progress=bars("calibration"),
  )
  moments.save(kept)
  return moments


def _with_counts(moments: Moments, counts: np.ndarray) -> Moments:
  """Moments whose counts are half those of a text, half their own.

  Raises:
    ValueError: the moments have another vocabulary.
  """
  moments.check(len(counts), len(moments.hidden))
  own = moments.counts * (counts.sum() / moments.counts.sum())
  return dataclasses.replace(moments, counts=(counts + own) / 2)


@dataclasses.dataclass(frozen=True)
class TensorJob:
  """A call of `compress_tensors`.

  Attributes:
    model: a folder of safetensors, of any architecture.
    out: folder to be written.
    size: bound of the bytes of all tables, as of `byte_budget`.
    moments: files of moments by the names of the tensors that are compressed, [V, D] each; None for
      one whose use is unknown.
    counts: occurrences of tokens for such tensors, [V]; None: all alike.
  """

  model: pathlib.Path
  out: pathlib.Path
  size: int | str
  moments: Mapping[str, pathlib.Path | None]
  counts: np.ndarray | None = None


def compress_tensors(job: TensorJob, say: Callable[[str], None]) -> dict[str, Any]:
  """Compress tensors of a folder, whose model is not run; return what `vqjax.json` says.

  All other files and tensors are copied. The new folder is whole or not there.

  Raises:
    ValueError: the folder is compressed already or not of safetensors, lacks a tensor, or has one
      that is not finite; the size cannot be reached; moments are those of another table.
  """
  begin = time.monotonic()
  check_output(job.out, "--out", folder=True)
  source = readers.open_source(job.model)
  check_not_compressed(source)
  if source.kind != "safetensors":
    raise ValueError(
      f"`--table` needs a folder of safetensors; got {job.model}, which is {source.kind}. Leave it"
      " out, and give `--text`."
    )
  moments = {name: path and read_moments(path) for name, path in job.moments.items()}
  is_table = lambda tensor: len(tensor.shape) == 2 and tensor.format not in NARROW
  of_two_axes = [name for name, tensor in source.tensors.items() if is_table(tensor)]
  for name in moments:
    if name not in of_two_axes:
      near = difflib.get_close_matches(name, of_two_axes, 3, 0.0)
      raise ValueError(
        f"`--table` must be a tensor [V, D] of {job.model}; got {name}. Similar names:"
        f" {', '.join(near)}."
      )
    vocab, dim = source.tensors[name].shape
    if moments[name] is None:
      counts = np.ones(vocab) if job.counts is None else job.counts
      moments[name] = Moments(np.eye(dim), counts, 1)
    moments[name].check(vocab, dim)
  before = {name: (name, source.tensors[name]) for name in moments}
  size = byte_budget(job.size, sum(tensor.nbytes for _, tensor in before.values()))
  others = sum(tensor.nbytes for name, tensor in source.tensors.items() if name not in moments)
  numbers = sum(math.prod(source.tensors[name].shape) for name in moments)
  folder = job.out.absolute().parent
  check_free(folder, others + _least_bytes(size, numbers))
  tables = {}
  for name in moments:
    tensor = source.tensors[name]
    readers.verify_tensor(name, tensor, source.path)
    # Mapped from the file: only blocks of rows are turned into float32.
    tables[name] = tensor.read(slice(None))
    for first in range(0, tensor.shape[0], ROWS):
      rows = tables[name][first : first + ROWS]
      check_rows(np.asarray(rows, np.float32), name)
      readers.release(rows)
  made = Tables(tables, moments)

  def measure(step: float) -> Point:
    point = Point(step, made.size(step), None)
    say(f"step {step:.4g}: {point.bytes:,} bytes")
    return point

  best, _ = search(measure, size=size, limits=made.limits)
  with ProgressBars() as bars:
    step, coded = made.coded(best.step, size, bars("coding"))[::2]
  sizes = {name: sum(array.nbytes for array in parts.values()) for name, parts in coded.items()}
  _check_smaller(sum(sizes.values()), before, "--bytes")
  manifest = {
    "format": container.FORMAT,
    "version": container.VERSION,
    "tables": {
      name: {"tensor": name, "shape": list(tables[name].shape), "bytes": size}
      for name, size in sizes.items()
    },
    "report": {
      "step": step,
      "bytes": sum(sizes.values()),
      "bytes_before": sum(tensor.nbytes for _, tensor in before.values()),
      "parts": {n: {part: a.nbytes for part, a in parts.items()} for n, parts in coded.items()},
      "seconds": round(time.monotonic() - begin, 1),
      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    },
  }
  check_free(folder, others + sum(sizes.values()))
  with new_output(job.out, "--out", folder=True) as partial:
    try:
      copy_folder(source, partial, lambda name, _: _parts_of(name, coded.get(name)))
    except Exception as error:  # safetensors has an error of its own for a failed write
      raise records.disk_error(error, partial) from error
    records.write(partial / container.MANIFEST, manifest)
  return manifest


def _least_bytes(size: int | None, numbers: int) -> int:
  """Bytes that tables of so many numbers will take, before they are coded; 0 without a bound.

  They fill most of the bound, but one of more than 8 bits a number may not be reached.
  """
  return 0 if size is None else int(min(CLOSE_SIZE * size, numbers))


def _parts_of(name: str, parts: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray] | None:
  """The parts of a compressed table by the names of their tensors; None for another tensor."""
  if parts is None:
    return None
  return {name + container.SEPARATOR + part: array for part, array in parts.items()}


def _write(job, work, source, loaded, coded, result):
  """Write the folder beside its place, and move it there."""
  model, variables, tokenizer = loaded
  stored = stored_tables(source, model)
  names = {name: part for part, (name, _) in stored.items()}
  others = sum(tensor.nbytes for name, tensor in source.tensors.items() if name not in names)
  check_free(work, result["bytes"] + others)
  folder, tensors = work / "model", {part: name for name, part in names.items()}
  try:
    if source.kind == "safetensors":
      is_tied = model.head.embedding is not None

      def replaced(name, _):
        # A tied head that the files have too is the embedding.
        is_head = is_tied and name == readers.HEAD and name not in names
        return {} if is_head else _parts_of(name, coded.get(names.get(name)))

      copy_folder(source, folder, replaced)
    elif source.kind == "gguf":
      folder.mkdir()
      _write_gguf(source.path, folder / "model.gguf", stored, coded, job.runtime)
    else:
      tensors = write_folder(folder, model, variables, tokenizer, compressed=coded)
  except Exception as error:  # safetensors has an error of its own for a failed write
    raise records.disk_error(error, folder) from error
  tables = {n: {"tensor": tensors[n]} | result["tables"][n] for n in coded}
  manifest = {"format": container.FORMAT, "version": container.VERSION, "tables": tables}
  manifest["runtime"] = job.runtime
  manifest["report"] = {n: v for n, v in result.items() if n not in ("tables", "hardest")}
  records.write(folder / container.MANIFEST, manifest)
  sizes = {f.name: f.stat().st_size for f in sorted(folder.iterdir())}
  write_text(folder / "report.md", _report(job, result, sizes))
  publish(folder, job.out)
  shutil.rmtree(work, ignore_errors=True)


def _write_gguf(
  path: pathlib.Path,
  out: pathlib.Path,
  stored: Mapping[str, tuple[str, readers.Tensor]],
  coded: Mapping[str, Mapping[str, np.ndarray]],
  runtime: str,
) -> None:
  """Write a GGUF again with compressed tables; only this library reads it."""
  types = readers.import_checkpoints_extra("gguf").GGMLQuantizationType
  kinds = {np.dtype(dtype): int(types[name]) for name, dtype in readers.PART_DTYPES.items()}
  replaced, sums = {}, {}
  for part, (name, _) in stored.items():
    arrays = {n: np.ascontiguousarray(x) for n, x in _parts_of(name, coded[part]).items()}
    sums |= {n: zlib.crc32(x) for n, x in arrays.items()}
    replaced[name] = [
      NewTensor(n, x.shape, kinds[x.dtype], x.nbytes, [x.tobytes()]) for n, x in arrays.items()
    ]
  facts = {"format": container.FORMAT, "version": container.VERSION, "runtime": runtime}
  facts |= {"tables": {part: name for part, (name, _) in stored.items()}, "crc32": sums}
  rewrite_gguf(path, out, replaced, {readers.TABLES_KEY: json.dumps(facts)})


def _report(job: CompressionJob, result: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
  """The report page of a compressed folder, in Markdown."""
  line = lambda *cells: "| " + " | ".join(map(str, cells)) + " |"
  cell = lambda text: repr(text)[1:-1].replace("|", "\\|")
  held = result["held_out"]
  before, formats = result["bytes_before"], ", ".join(result["formats_before"])
  lines = [
    f"# {job.out.name}",
    "",
    f"The vocabulary tables take {result['bytes']:,} bytes, {before / result['bytes']:.1f} times"
    f" less than the {before:,} of the model's file ({formats}). On {held['tokens']:,} held-out"
    f" tokens{'' if job.texts else ' that the model wrote itself'} the mean divergence from the"
    f" original model is {held['kl']:.5f} nats a token. Compressing took {result['seconds']:.0f} s"
    f" and {result['peak_bytes'] / 1e9:.2f} GB of memory. When the folder is"
    f" loaded, the tables are {checkpoints.RUNTIMES[job.runtime].described}.",
    "",
    "## Size",
    "",
    line("file or part", "bytes"),
    line("---", "---:"),
    *(line(name, f"{size:,}") for name, size in sizes.items()),
  ]
  for name, parts in result["parts"].items():
    lines += [line(f"{name}: {part}", f"{n:,}") for part, n in sorted(parts.items())]
  lines += [
    "",
    "## Held-out text",
    "",
    "KL is that of the compressed model from the original one, in nats a token. 95 % of the means"
    " of windows drawn with replacement are between the two numbers.",
    "",
    line(
      "domain",
      "tokens",
      "KL",
      "95 % of means",
      "99th percentile",
      "same best token",
      "nats",
      "nats before",
    ),
    line("---", *["---:"] * 7),
  ]
  for name, row in [*held["domains"].items(), ("all", held)]:
    lines.append(
      line(
        name,
        f"{row['tokens']:,}",
        f"{row['kl']:.5f}",
        " to ".join(f"{x:.5f}" for x in row["kl_interval"]),
        f"{row['kl_p99']:.4f}",
        f"{100 * row['top1']:.2f} %",
        f"{row['nats']:.4f}",
        f"{row['nats_before']:.4f}",
      )
    )
  types = result["block_types"]
  if types:
    columns = *held["domains"], "all"
    lines += ["", "## Block types of GGUF", ""]
    lines += [
      "KL of the same tables and text, with numbers rounded as llama.cpp does without an importance"
      " matrix, and, where that is quick, with numbers fitted as `vqjax export` does.",
      "",
    ]
    lines += [line("tables", "bytes", *columns), line("---", *["---:"] * (len(columns) + 1))]
    rows = {"this folder": held | {"bytes": result["bytes"]}} | types
    for name, row in sorted(rows.items(), key=lambda entry: -entry[1]["bytes"]):
      kls = [f"{own['kl']:.5f}" for own in (*row["domains"].values(), row)]
      lines.append(line(name, f"{row['bytes']:,}", *kls))
  lines += ["", "## Size against KL", "", "On calibration text, by the steps that were tried.", ""]
  lines += [line("step", "bytes", "KL"), line("---:", "---:", "---:")]
  for point in result["points"]:
    kl = "-" if point["kl"] is None else f"{point['kl']:.5f}"
    lines.append(line(f"{point['step']:.4g}", f"{point['bytes']:,}", kl))
  lines += ["", "## Hardest tokens", "", line("domain", "before", "token", "KL")]
  lines += [line("---", "---", "---", "---:")]
  for row in result["hardest"]:
    lines.append(
      line(row["domain"], f"`{cell(row['before'])}`", f"`{cell(row['token'])}`", f"{row['kl']:.3f}")
    )
  return "\n".join(lines) + "\n"


def _in_block_types(
  compression: DecoderTables, judge: Reference, progress: Callable[[float], None]
) -> dict[str, dict[str, Any]]:
  """Bytes and divergence of the tables in each block type of GGUF that suits their width.

  Numbers are rounded as llama.cpp does without an importance matrix, and under "TYPE, fitted"
  chosen in the metric of the table's use where levels are even. Without the package `gguf` there
  are none.
  """
  try:
    import gguf
  except ImportError:
    return {}
  metrics = {name: moments.metric() for name, moments in compression.made.moments.items()}
  ways = []
  for name, kind in gguf_types.TYPES.items():
    if not any(table.shape[1] % kind.block for table in compression.made.tables.values()):
      ways.append((name, name, {}))
      # With 8 bits there is next to nothing to choose; levels at unequal distances take minutes.
      if len(kind.grid.levels) < 2**7 and kind.grid.is_uniform:
        ways.append((f"{name}, fitted", name, metrics))
  found = {}
  for number, (title, name, metric) in enumerate(ways):
    size, tables = 0, {}
    for owner, table in compression.made.tables.items():
      tables[owner] = np.empty_like(table)
      for first in range(0, len(table), ROWS):
        packed = gguf_types.encode_blocks(name, table[first : first + ROWS], metric.get(owner))
        values = gguf.dequantize(packed, gguf.GGMLQuantizationType[name])
        tables[owner][first : first + ROWS] = values
        size += packed.nbytes
    own = lambda part, number=number: progress((number + part) / len(ways))
    (compared,) = judge.compare([with_tables(compression.variables, tables)], own)
    found[title] = {"bytes": size} | summary(compared, judge.windows)
  return found
