"""Gemma 3 270M with its table compressed to several sizes, judged end to end by domain.

python -m experiments.gemma_compression --model gemma-3-270m-q4_k_m.gguf
python -m experiments.gemma_compression --model gemma-3-270m-q4_k_m.gguf --tokens 512
python -m experiments.gemma_compression --model gemma-3-270m-q4_k_m.gguf --packed 95 80
python -m experiments.gemma_compression --model gemma-3-270m-q4_k_m.gguf --ideal
python -m experiments.gemma_compression --model gemma-3-270m-q4_k_m.gguf --speed

The table is tied: the inputs and the outputs both use the compressed one. Texts are those of
$VQJAX_DATA and what is installed on a Debian system: manual pages of many languages, licences and
Python's library. A domain is a list of different documents, in the order of their names. Every
fourth is held out, without long lines that the others have; the others are for counts and
calibration. The licences and the Greek lesson of Vim are held out as a whole; no other text is
Greek.

An interrupted call goes on where it was, unless what it kept is of another table, calibration, text
or version of the file; the results are docs/results/compression.json. With `--packed` the sizes are
those of tables in memory, which a `PackedHead` scores without unpacking them; the results are
docs/results/compression-packed.json. `--ideal` compares the bytes of the tables that earlier calls
made with those of an ideal coder; the results are WORK/ideal.json. `--speed` times greedy
generation with the original table and with the forms in memory of the first size; the results are
WORK/speed.json.
"""

import argparse
import csv
import dataclasses
import gzip
import json
import pathlib
import re
import resource
import sysconfig
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vqjax.lab import exits
from vqjax.lab.training.provenance import provenance
from vqjax.lm import checkpoints, records
from vqjax.lm.compression.calibration import SEED, collect
from vqjax.lm.compression.decoder_tables import DecoderTables
from vqjax.lm.compression.judging import Reference, with_tables
from vqjax.lm.generation import GREEDY, generate, unstacked
from vqjax.lm.sources.readers import Tensor
from vqjax.lm.texts import TextWindows, data_path, encode_text, text_windows
from vqjax.outputs import atomic_file
from vqjax.tables import Moments, PackedTable, container, ideal_bits, pack, units_of
from vqjax.tables.coded import BIT, SMOOTHING, probabilities, row_group_steps
from vqjax.tables.moments import SHRINKAGE
from vqjax.tables.packing import ROW_GROUPS
from vqjax.tables.search import search

SIZES = (65, 50, 45, 30)
"""Megabytes of the table."""

WINDOW = 256
COUNTED = 2**20
"""Characters of a domain from which tokens are counted."""

LONG_LINE = 40
"""Characters above which a line of held-out text must not be in a text that is not held out."""

DOMAINS = ("wikipedia", "news", "stories", "python", "manuals", "german", "french", "russian")
COUNTED_ONLY = ("es", "it", "ja", "ko", "pl", "pt_BR", "tr", "uk", "zh_CN", "zh_TW")
"""Languages of manual pages that are counted, a quarter of a domain each."""

UNSEEN = {"licences": "no calibration saw such text", "greek": "no count saw the language"}


def documents(name: str) -> Iterator[str]:
  """The documents of a domain."""
  manuals = {"manuals": "man[1-8]", "german": "de", "french": "fr", "russian": "ru"}
  if name == "wikipedia":
    text = data_path("wikitext-2/valid.txt").read_text("utf-8")
    text += data_path("wikitext-2/test.txt").read_text("utf-8")
    text = re.sub(r" @(.)@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)'])", r"\1", text).replace("( ", "(")
    # Articles begin with a title between single equals signs.
    yield from re.split(r"(?m)^(?= = [^=])", text.replace("<unk>", "one"))
  elif name == "news":
    with open(data_path("ag_news/test.csv"), encoding="utf-8", newline="") as lines:
      for _, title, text in csv.reader(lines):
        yield f"{title}\n{text}\n\n"
  elif name == "stories":
    text = data_path("tinystories/gpt2_tokens_test.decoded.txt").read_text("utf-8")
    for story in text.split("<|endoftext|>"):
      yield story.strip() + "\n\n"
  elif name == "python":
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
      yield path.read_text("utf-8", "replace")
  elif name == "licences":
    for path in sorted(pathlib.Path("/usr/share/common-licenses").iterdir()):
      if not path.is_symlink():
        yield path.read_text("utf-8", "replace")
  elif name == "greek":
    for path in sorted(pathlib.Path("/usr/share/vim").glob("vim*/tutor/tutor.el.utf-8")):
      yield path.read_text("utf-8")
  else:
    folder = pathlib.Path("/usr/share/man")
    pattern = manuals.get(name, name)
    pattern += "/*.gz" if name == "manuals" else "/man[1-8]/*.gz"
    for path in sorted(folder.glob(pattern)):
      if path.is_file() and not path.is_symlink():
        yield plain(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))


def plain(roff: str) -> str:
  """The words of a manual page."""
  lines = []
  for line in roff.splitlines():
    if line.startswith(('.\\"', "'", ".de", ".if", ".ie", ".nr", ".ds", ".TH")):
      continue
    line = re.sub(r"^\.(?:[A-Z]{1,2}|[a-z]{2})\b ?", "", line).replace('"', "")
    line = re.sub(r"\\f.|\\&|\\/|\\s[-+]?\d|\\\|", "", line)
    line = re.sub(r"\\\((?:aq|cq|oq)", "'", line).replace("\\(bu", "*").replace("\\-", "-")
    if line.strip() and not line.startswith("."):
      lines.append(line.replace("\\e", "\\"))
  return "\n".join(lines) + "\n\n"


def split(name: str) -> tuple[str, str]:
  """Text for counts and calibration, and held-out text, of at most `COUNTED` characters each."""
  sides: list[list[str]] = [[], []]
  # Some pages are installed under several names.
  for number, text in enumerate(dict.fromkeys(documents(name))):
    side = 1 if name in UNSEEN or number % 4 == 3 else 0
    # A long document would leave out the others.
    sides[side].append(text[: COUNTED // 16])
  return "".join(sides[0])[:COUNTED], "".join(sides[1])[:COUNTED]


def long_lines(text: str) -> set[str]:
  """The lines that are too long to be in two texts by chance."""
  return {line.strip() for line in text.splitlines() if len(line.strip()) > LONG_LINE}


@dataclasses.dataclass
class Texts:
  """Windows of calibration text, held-out text and unseen text, and counts of tokens."""

  calibration: TextWindows
  held_out: TextWindows
  counts: np.ndarray


def read_domains(tokenizer, vocab: int, kept: pathlib.Path) -> Texts:
  """The texts of all domains as tokens, which `kept` has after the first call."""
  if kept.is_file():
    with np.load(kept) as found:
      of = lambda name: TextWindows(
        found[f"{name}_tokens"], found[f"{name}_domain"], tuple(found[f"{name}_names"].tolist())
      )
      return Texts(of("calibration"), of("held_out"), found["counts"])
  counts = np.zeros(vocab)
  sides: list[dict[str, list[int]]] = [{}, {}]
  begin: list[int] = []
  texts = {name: split(name) for name in (*DOMAINS, *COUNTED_ONLY, *UNSEEN)}
  seen = {line for ours, _ in texts.values() for line in long_lines(ours)}
  for name, (ours, others) in texts.items():
    others = "".join(line for line in others.splitlines(True) if not seen & long_lines(line))
    begin, tokens = encode_text(tokenizer, ours)
    if len(tokens):
      weight = 0.25 if name in COUNTED_ONLY else 1.0
      own = np.bincount(np.asarray(tokens), minlength=vocab)
      counts += own * (weight * 2**18 / len(tokens))
    if name in DOMAINS:
      sides[0][name] = tokens
    if name in DOMAINS or name in UNSEEN:
      sides[1][name] = encode_text(tokenizer, others)[1]
  # What begins every text is an input of each window, and all later positions attend to it.
  counts[begin] += counts.sum() / WINDOW
  made = [text_windows(side, begin, WINDOW) for side in sides]
  named = zip(("calibration", "held_out"), made)
  arrays = {f"{side}_{f}": np.asarray(v) for side, of in named for f, v in vars(of).items()}
  with atomic_file(kept) as out:
    np.savez(out, counts=counts, **arrays)
  return Texts(made[0], made[1], counts)


def spread_windows(of, count: int):
  """`count` windows of each domain, at equal distances."""
  at = []
  for domain in range(len(of.names)):
    own = np.flatnonzero(of.domain == domain)
    at.append(own[np.linspace(0, len(own) - 1, min(count, len(own))).astype(int)])
  order = np.concatenate([np.array([a[i] for a in at if i < len(a)]) for i in range(count)])
  return dataclasses.replace(of, tokens=of.tokens[order], domain=of.domain[order])


@dataclasses.dataclass
class _Table:
  """A compressed table; the identity is that of `table_identity`."""

  step: float
  bytes: int
  parts: dict[str, int]
  seconds: dict[str, float]
  identity: str = ""


@dataclasses.dataclass
class _Row:
  """Some windows of a domain of held-out text under all sizes; see `identity_of_rows`."""

  domain: str
  part: int
  sizes: dict[str, dict[str, Any]]
  identity: str = ""


def rows_of(options: argparse.Namespace) -> pathlib.Path:
  """The file of the rows."""
  return options.work / ("rows-packed.jsonl" if options.packed else "rows.jsonl")


AT_ONCE = 2
"""Windows of a row."""

MOST_PARTS_UNSEEN = 2
"""Rows of each unseen text."""


def _bytes_of(*arrays: np.ndarray) -> list[memoryview]:
  return [memoryview(np.ascontiguousarray(array)).cast("B") for array in arrays]


def table_identity(compression: DecoderTables) -> str:
  """A checksum of what a compressed table is made of: the table, the moments and the version."""
  moments = compression.made.moments["embedding"]
  arrays = [compression.made.tables["embedding"], moments.hidden, moments.counts]
  if moments.inputs is not None:
    arrays.append(moments.inputs)
  facts = container.FORMAT, container.VERSION, SHRINKAGE, SMOOTHING, BIT, moments.tokens
  return records.checksum(repr(facts).encode(), *_bytes_of(*arrays))


def identity_of_rows(tokens: int, held_out: TextWindows, tables) -> str:
  """A checksum of what rows are about: the tables, and the held-out text and how much of it."""
  facts = tokens, [(size, table["identity"], table["bytes"]) for size, table in tables.items()]
  arrays = held_out.tokens, held_out.domain
  return records.checksum(repr(facts).encode(), *_bytes_of(*arrays))


def judge(options, model, variables, held_out, students, tables, say, keep, made_by) -> None:
  """Compare all sizes with the model, some windows of each domain in turn."""
  windows_each = max(1, options.tokens // ((WINDOW - 2) * len(DOMAINS)))
  done = records.read_json_rows(rows_of(options), _Row)
  identity = identity_of_rows(options.tokens, held_out, tables)
  rows = [row for row in done.rows if row.get("identity") == identity]
  if others := len(done.rows) - len(rows):
    say(f"{others} rows are left out: they are of other tables or another text")
  keep(rows)
  for part in range(-(-windows_each // AT_ONCE)):
    for number, name in enumerate(held_out.names):
      if (name, part) in [(row["domain"], row["part"]) for row in rows]:
        continue
      if name in UNSEEN and part >= MOST_PARTS_UNSEEN:
        continue
      own = np.flatnonzero(held_out.domain == number)
      chosen = np.linspace(0, len(own) - 1, min(windows_each, len(own))).astype(int)
      # Spread out, so that the first parts are of all documents too.
      chosen = own[chosen[part :: -(-windows_each // AT_ONCE)]]
      if not len(chosen):
        continue
      some = dataclasses.replace(
        held_out, tokens=held_out.tokens[chosen], domain=held_out.domain[chosen]
      )
      begun = time.monotonic()
      found = Reference(model, variables, some).compare(students)
      row = {"domain": name, "part": part, "sizes": {}, "identity": identity}
      for size, compared in zip(tables, found):
        fields = {"kl": "kl", "log_prob": "after", "teacher_log_prob": "before"}
        row["sizes"][size] = {
          short: [round(float(x), 6) for x in compared[field].ravel()]
          for field, short in fields.items()
        } | {"agrees": int(compared["agrees"].sum()), "tokens": compared["kl"].size}
      row |= {"seconds": time.monotonic() - begun, "commit": made_by["commit"]}
      sealed = records.sealed(row, done.checksums[-1] if done.checksums else "")
      with open(rows_of(options), "a", encoding="utf-8") as out:
        out.write(records.dumps(sealed))
      rows.append(row)
      done.checksums.append(sealed[records.CHECKSUM])
      kls = (f"{s} MB {np.mean(r['kl']):.5f}" for s, r in row["sizes"].items())
      keep(rows)
      say(f"{name}, part {part}: {', '.join(kls)} ({row['seconds']:.0f} s)")


def main() -> int:
  """Run the experiment, or go on with it."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", help="Gemma 3 270M: a GGUF or a folder")
  parser.add_argument("--show", type=pathlib.Path, metavar="JSON", help="print tables of results")
  parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/gemma"))
  parser.add_argument("--json", type=pathlib.Path, help="results (default: WORK/results.json)")
  parser.add_argument("--tokens", type=int, default=20_320, help="held-out tokens of all domains")
  parser.add_argument("--calibration", type=int, default=2**14, help="calibration tokens")
  parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="megabytes")
  parser.add_argument("--packed", type=float, nargs="+", metavar="MB", help="sizes in memory")
  parser.add_argument("--ideal", action="store_true", help="compare with an ideal coder")
  parser.add_argument("--speed", action="store_true", help="time generation of the forms in memory")
  options = parser.parse_args()
  if options.show:
    print(shown(json.loads(options.show.read_text("utf-8"))))
    return 0
  if not options.model:
    parser.error("--model must be given")
  work = options.work
  work.mkdir(parents=True, exist_ok=True)
  say = lambda text: print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
  model, variables, tokenizer = checkpoints.load(data_path(options.model, kind="--model"))
  begun = time.monotonic()
  texts = read_domains(tokenizer, model.head.vocab, work / "texts.npz")
  say(f"texts: {len(texts.calibration.tokens)} and {len(texts.held_out.tokens)} windows")
  kept = work / "moments.safetensors"
  some = spread_windows(texts.calibration, -(-options.calibration // (WINDOW * len(DOMAINS))))
  # `collect` takes whole windows, of which the first token predicts nothing.
  tokens = (WINDOW - 1) * min(len(some.tokens), -(-options.calibration // (WINDOW - 1)))
  if not kept.is_file() or Moments.load(kept).tokens != tokens:
    cache = work / f"sums-{options.calibration}.npz"
    report = lambda part: say(f"calibration {100 * part:.0f} %") if part * 64 % 8 < 1 else None
    moments = collect(
      model, variables, some.tokens, texts.counts, cache=cache, progress=report,
      hidden_tokens=options.calibration, expected_tokens=options.calibration // 4,
      fisher_tokens=options.calibration // 16,
    )  # fmt: skip
    partial = work / "moments.partial"
    moments.save(partial)
    partial.replace(kept)
    cache.unlink(missing_ok=True)
    say(f"calibration took {time.monotonic() - begun:.0f} s")
  # As they are in the file, also in the call that wrote it.
  moments = Moments.load(kept)
  compression = DecoderTables(model, variables, moments)
  made_by = provenance()
  if options.ideal:
    found = {"sizes": beside_ideal(options, compression, say), "provenance": made_by}
    found["settings"] = result_settings(moments, texts.counts)
    records.write(options.json or work / "ideal.json", found)
    return 0
  if options.speed:
    found = generation_speed(options, compression, tokenizer, say) | {"provenance": made_by}
    records.write(options.json or work / "speed.json", found)
    return 0
  tables, students = {}, []
  make = with_packed_table if options.packed else with_coded_table
  for size in options.packed or options.sizes:
    tables[f"{size:g}"], student = make(options, compression, size)
    students.append(student)
    say(f"{size:g} MB: {tables[f'{size:g}']}")

  def keep(rows) -> None:
    # Rows that were kept may be of an earlier call, at another commit.
    commits = sorted({str(row.get("commit")) for row in rows})
    result = assembled(rows, tables) | {"provenance": made_by, "commits_of_rows": commits}
    result["settings"] = result_settings(moments, texts.counts)
    result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    name = "results-packed.json" if options.packed else "results.json"
    records.write(options.json or work / name, result)

  judge(options, model, variables, texts.held_out, students, tables, say, keep, made_by)
  return 0


def result_settings(moments: Moments, counts: np.ndarray) -> dict[str, Any]:
  """What the results depend on beside the texts and the model."""
  return {
    "calibration_tokens": moments.tokens,
    "counted_tokens": float(counts.sum()),
    "classes": len(row_group_steps(probabilities(moments.counts), 1.0)[1]),
    "window": WINDOW,
    "shrinkage": SHRINKAGE,
    "smoothing": SMOOTHING,
    "seed": SEED,
  }


def kept_table(work: pathlib.Path, compression: DecoderTables, size: float):
  """What is known of the table of a size; None if it is of other moments or another version."""
  known = records.read(work / f"table-{size:g}.json", _Table)
  same = known is not None and known.get("identity") == table_identity(compression)
  return known if same else None


def with_coded_table(options, compression: DecoderTables, size: float):
  """What is known of the table of a size, and the variables of the model with it."""
  known = kept_table(options.work, compression, size)
  if known is not None:
    return known, compression.variables_of(compression.made.tables_at(known["step"]))
  begun, most = time.monotonic(), int(size * 1e6)
  point = lambda step: compression.point(step, None)
  step = search(point, size=most, limits=compression.made.limits)[0].step
  searched = time.monotonic()
  step, made, coded = compression.made.coded(step, most)
  encoded = time.monotonic()
  parts = coded["embedding"]
  container.CompressedTable(parts).levels()
  table = {
    "step": step,
    "bytes": sum(array.nbytes for array in parts.values()),
    "parts": {name: array.nbytes for name, array in parts.items()},
    "seconds": {
      "search": searched - begun,
      "quantize, encode and verify": encoded - searched,
      "decode": time.monotonic() - encoded,
    },
    "identity": table_identity(compression),
  }
  records.write(options.work / f"table-{size:g}.json", table)
  return table, compression.variables_of(made)


def with_packed_table(options, compression: DecoderTables, size: float):
  """What is known of the packed table of a size, and the variables of the model with its rows."""
  made, seconds = packed_table(options, compression, size)
  layer, _ = made.embedding(param_dtype=jnp.float16)
  known = {"bytes": layer.size().state_bytes, "seconds": {"pack": seconds}}
  known["identity"] = table_identity(compression)
  return known, with_tables(compression.variables, {"embedding": made.table()})


def packed_table(options, compression: DecoderTables, size: float) -> tuple[PackedTable, float]:
  """The packed table of a size, and the seconds that it took; the first call makes it."""
  path = options.work / f"packed-{size:g}.npz"
  table, moments = compression.made.tables["embedding"], compression.made.moments["embedding"]
  identity = table_identity(compression)
  fields = _read_arrays(path)
  if str(fields.get("identity")) != identity:
    begun = time.monotonic()
    # A rank takes 4 bytes.
    units = units_of(int(size * 1e6), *table.shape, ROW_GROUPS, others=4 * len(table))
    made = pack(table, moments, units, is_trellis=False)
    with atomic_file(path) as out:
      seconds = time.monotonic() - begun
      np.savez(out, **dataclasses.asdict(made), seconds=seconds, identity=identity)
    fields = _read_arrays(path)
  seconds = float(fields.pop("seconds"))
  del fields["identity"]
  return PackedTable(**fields | {"is_trellis": bool(fields["is_trellis"])}), seconds


def _read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
  """The arrays of a file; none if there is no file."""
  if not path.is_file():
    return {}
  with np.load(path) as found:
    return {name: found[name] for name in found.files}


PROMPT = "The capital of France is"
SPEED_TOKENS, ROUNDS = 32, 5
"""Tokens of a continuation that is timed, and how often each is."""

IN_MEMORY = 95.0
"""Megabytes of the packed table that is timed."""


def generation_speed(options, compression: DecoderTables, tokenizer, say) -> dict[str, Any]:
  """Tokens a second of greedy generation, medians of rounds in which each way has its turn."""
  model, variables = compression.model, compression.variables
  known = with_coded_table(options, compression, options.sizes[0])[0]
  rows = compression.made.tables_at(known["step"])["embedding"].table()
  dense = Tensor(rows.shape, "F32", rows.nbytes, rows.__getitem__)
  bits = packed_table(options, compression, IN_MEMORY)[0]
  # On the device, as the others are: NumPy's rows would be copied there in every call.
  made = {
    f"{options.sizes[0]:g} MB, unpacked, float32": with_tables(
      variables, {"embedding": jnp.asarray(rows)}
    ),
    "original, float32": variables,
  }
  low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables)
  ways = {name: (model, own) for name, own in made.items()}
  own = model.embedding.clone(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  head = model.head.clone(embedding=own, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  ways["original, bfloat16"] = model.clone(embedding=own, head=head, dtype=jnp.bfloat16), low
  for name, tensor in (
    ("int8", dense),
    ("packed", dataclasses.replace(dense, table=bits)),
  ):
    form = checkpoints.RUNTIMES[name].layers(model, {"embedding": tensor})
    body = {name: tree for name, tree in variables["params"].items() if name != "embedding"}
    given = jax.tree.map(jnp.asarray, form.variables)
    given["params"] = body | given["params"]
    ways[name] = model.clone(embedding=form.embedding, head=form.head), given
  ways = {name: (own, unstacked(given)) for name, (own, given) in ways.items()}
  prompt, times = tokenizer.encode(PROMPT), {name: [] for name in ways}
  for number in range(ROUNDS + 1):
    for name, (own, given) in ways.items():
      begun = time.perf_counter()
      call = own, given, [prompt], jax.random.key(0), GREEDY
      generate(*call, max_tokens=SPEED_TOKENS, stop=(), log_probs=False)
      if number:  # the first round compiles
        times[name].append(time.perf_counter() - begun)
  first = float(np.median(times["original, float32"]))
  found = {}
  for name, (_, given) in ways.items():
    seconds = float(np.median(times[name]))
    arrays = (tree.get("embedding", {}) for tree in given.values())
    found[name] = {
      "tokens_per_second": SPEED_TOKENS / seconds,
      "ratio": first / seconds,
      "table_bytes": sum(x.nbytes for tree in arrays for x in jax.tree.leaves(tree)),
    }
    say(f"{name}: {found[name]}")
  settings = {"prompt": PROMPT, "tokens": SPEED_TOKENS, "rounds": ROUNDS, "batch": 1}
  return {"ways": found, "settings": settings}


def beside_ideal(options, compression: DecoderTables, say) -> dict[str, dict[str, Any]]:
  """Bytes of the tables that are kept, and those of an ideal coder of integers and row groups."""
  found = {}
  for size in options.sizes:
    known = kept_table(options.work, compression, size)
    if known is None:
      say(f"{size:g} MB: no table of this calibration is kept; call without --ideal first")
      continue
    made = compression.made.tables_at(known["step"])["embedding"]
    share = np.bincount(made.row_group) / len(made.levels)
    bits = ideal_bits(made).sum() - len(made.levels) * (share * np.log2(share)).sum()
    # What no coder of the integers could leave out: the transform and the mean row.
    fixed = known["parts"]["inverse"] + known["parts"]["mean"]
    ideal = round(float(bits / 8 + fixed))
    found[f"{size:g}"] = {"step": known["step"], "bytes": known["bytes"], "ideal_bytes": ideal}
    more = 100 * (known["bytes"] / ideal - 1)
    say(f"{size:g} MB: {known['bytes']:,} bytes, ideal {ideal:,}, {more:.2f} % more")
  return found


def assembled(rows, tables) -> dict:
  """The results: the means over the eight domains, and each domain and each unseen text."""
  sizes = {}

  def means(some):
    if not some:
      return {}
    joined = lambda key: np.concatenate([row[key] for row in some])
    kl = joined("kl")
    return {
      "tokens": len(kl),
      "kl": float(kl.mean()),
      "kl_p99": float(np.quantile(kl, 0.99)),
      "top1": sum(row["agrees"] for row in some) / len(kl),
      "nats_before": float(-joined("before").mean()),
      "nats": float(-joined("after").mean()),
    }

  for size, table in tables.items():
    own = {
      name: [r["sizes"][size] for r in rows if r["domain"] == name] for name in (*DOMAINS, *UNSEEN)
    }
    sizes[size] = table | means([row for name in DOMAINS for row in own[name]])
    sizes[size]["domains"] = {name: means(own[name]) for name in DOMAINS}
    sizes[size]["unseen"] = {name: means(own[name]) for name in UNSEEN}
  return {"sizes": sizes}


SHOWN = ("stories", "russian", *UNSEEN)
"""Texts whose own divergence is shown: an easy one, a hard one, and the unseen ones."""


def shown(result) -> str:
  """The results as a table in Markdown."""
  line = lambda *cells: f"| {' | '.join(map(str, cells))} |"
  columns = "MB", "KL", "99th percentile", "same best token, %", "nats, before"
  lines = [line(*columns, *(f"KL, {name}" for name in SHOWN))]
  lines.append(f"|{'---:|' * (len(columns) + len(SHOWN))}")
  for row in result["sizes"].values():
    numbers = f"{row['bytes'] / 1e6:.1f}", f"{row['kl']:.4f}", f"{row['kl_p99']:.3f}"
    numbers += f"{100 * row['top1']:.1f}", f"{row['nats']:.4f}, {row['nats_before']:.4f}"
    texts = row["domains"] | row["unseen"]
    # An interrupted run has not judged every text.
    kls = (f"{texts[name]['kl']:.4f}" if texts.get(name) else "–" for name in SHOWN)
    lines.append(line(*numbers, *kls))
  return "\n".join(lines)


if __name__ == "__main__":
  exits.run_main(main)
