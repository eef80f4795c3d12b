"""Heads over Gemma 3 270M's table that read a part of it: certified and routed.

python -m experiments.routed --model gemma-3-270m-q4_k_m.gguf
python -m experiments.routed --model gemma-3-270m-q4_k_m.gguf --only milliseconds \\
    --windows 1 --work runs/routed-times --json docs/results/routed.json

Hidden states are those of the texts of `experiments.gemma_compression`: centroids are trained on
states of its calibration text, and all numbers are of held-out text, by domain, and of unseen text.
The states are kept in the folder of work; an interrupted call goes on where it was. Results are
docs/results/routed.json.
"""

import argparse
import dataclasses
import functools
import json
import operator
import pathlib
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gemma_compression import DOMAINS, UNSEEN, WINDOW, read_domains, spread_windows
from vqjax import CertifiedHead, DenseHead, RoutedHead, assign
from vqjax.convert import LikelyTokens, likely_tokens, train_routes
from vqjax.lab import exits
from vqjax.lab.training.provenance import provenance
from vqjax.lm import checkpoints, records, tokenizers
from vqjax.lm.texts import data_path
from vqjax.ops import certified as ops
from vqjax.ops import narrow, sampling
from vqjax.outputs import atomic_file
from vqjax.tables import Moments

CLUSTERS, BUDGETS = 2048, (32, 94)
"""Clusters of 128 rows, and numbers of them that are 4,096 and 12,032 rows."""

SPREAD = 60
"""Windows of each domain, spread over its text, the first of which are used for training."""

WINDOWS_AT_ONCE = 8
"""Windows of a file of states."""

CERTIFIED_AT_ONCE = narrow.FEW
"""States of a check: of more a CPU takes all rows without a first pass."""

CERTIFIED_BUDGET = 1024
"""Rows that are scored again for the 50 best, of which more are in doubt than of the best one."""

CHECKS_AT_ONCE = 254
"""Checks of a line of the file that an interrupted call goes on with."""

PREFILTERS = (256, 384, 512)
"""Widths of KLT prefilters, whose best 64 rows are scored again."""

PREFILTERED = 1016
"""States on which they are measured."""

PARTS = ("milliseconds", "certified")
"""Parts of the results that a call with `--only` may renew."""


def collected_states(options, model, variables, say):
  """Hidden states, likely tokens and domains of training and held-out text."""
  vocab, head = model.head.vocab, dense_head(model)
  table = {"params": {"weight": variables["params"]["embedding"]["weight"]}}
  texts = None
  hidden_of = jax.jit(lambda v, tokens: model.apply(v, tokens, method="hidden"))
  found = {}
  sides = (("eval", options.windows), ("train", 0 if options.only else options.training_windows))
  for name, each in sides:
    if not each:
      found[name] = None
      continue
    parts = []
    names = len(DOMAINS) + len(UNSEEN) * (name == "eval")
    for first in range(0, each * names, WINDOWS_AT_ONCE):
      path = options.work / f"{name}-{first:05d}.npz"
      if not path.is_file():
        if texts is None:
          tokenizer = tokenizers.load_tokenizer(data_path(options.model, kind="--model"))
          texts = read_domains(tokenizer, vocab, options.work / "texts.npz")
        some = (
          spread_windows(texts.held_out, each)
          if name == "eval"
          else spread_windows(texts.calibration, SPREAD)
        )
        rows = some.tokens[first : first + WINDOWS_AT_ONCE]
        if not len(rows):
          break
        # The first prediction has no context, and the last no target.
        own = [np.asarray(hidden_of(variables, jnp.asarray(row)[None]))[0, 1:-1] for row in rows]
        hidden = np.concatenate(own).astype(np.float32)
        likely = likely_tokens(head, table, hidden)
        domain = np.repeat(some.domain[first : first + len(rows)], WINDOW - 2)
        with atomic_file(path) as out:
          np.savez(
            out, hidden=hidden, tokens=likely.tokens,
            log_prob=likely.log_probs.astype(np.float16), domain=domain,
          )  # fmt: skip
        say(f"states of {name}: {first + len(rows)} windows")
      with np.load(path) as file:
        parts.append({key: file[key] for key in ("hidden", "tokens", "log_prob", "domain")})
    found[name] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
  return found["train"], found["eval"], head, table


def dense_head(model) -> DenseHead:
  """The dense head over the tied table."""
  return DenseHead(model.head.vocab, model.dim, softcap=model.head.softcap)


def by_text(values, held):
  """The mean over the eight domains together, each of them, and each unseen text."""
  seen = held["domain"] < len(DOMAINS)
  names = (*DOMAINS, *UNSEEN)
  parts = {name: values[held["domain"] == at] for at, name in enumerate(names)}
  return {"domains": float(values[seen].mean()), "states": int(seen.sum())} | {
    name: float(part.mean()) for name, part in parts.items() if len(part)
  }


def agreement(head, variables, held):
  """Whether the cluster of the best token is among the chosen ones, for each number of them."""
  assignment = np.asarray(variables["codes"]["assignment"])
  score_NC = held["hidden"] @ np.asarray(variables["params"]["centroids"]).T
  own_N1 = np.take_along_axis(score_NC, assignment[held["tokens"][:, :1]], axis=1)
  # The best token's row is the best of all rows, and so of those that are scored.
  rank_N = (score_NC > own_N1).sum(axis=1)
  return {budget: by_text(rank_N < budget, held) for budget in BUDGETS}


def routed(options, train, held, head, table, say) -> dict:
  """Agreement of routed heads and prefilters with the dense head."""
  rows = np.asarray(table["params"]["weight"], np.float32)
  hidden = train["hidden"]
  moment = hidden.T.astype(np.float64) @ hidden / len(hidden)
  moments = Moments(moment, np.ones(len(rows)), len(hidden))
  kept = options.work / "order.npy"
  if not kept.is_file():
    begun = time.monotonic()
    order = assign.bisected(rows - rows.mean(axis=0), CLUSTERS, metric=moments.metric())
    with atomic_file(kept) as out:
      np.save(out, order)
    say(f"order: {time.monotonic() - begun:.0f} s")
  order = np.load(kept)
  own, plain = RoutedHead.from_dense(head, table, order, CLUSTERS, BUDGETS[0])
  result = {"plain": agreement(own, plain, held)}
  likely = LikelyTokens(train["tokens"], train["log_prob"].astype(np.float32))
  begun = time.monotonic()
  trained = train_routes(
    own, plain, hidden, likely, key=jax.random.key(0),
    report=lambda epoch, loss: say(f"epoch {epoch}: {loss:.4f} nats"),
  )  # fmt: skip
  result["seconds"] = time.monotonic() - begun
  result["trained"] = agreement(own, trained, held)
  result["states"] = len(hidden)
  say(f"plain {result['plain'][32]['domains']:.4f}, trained {result['trained'][32]['domains']:.4f}")
  some = {key: x[:: max(1, len(x) // PREFILTERED)] for key, x in held.items()}
  result["prefilters"] = prefilters(rows, moments.hidden, some)
  return result, own, trained


def prefilters(rows, moment, held) -> dict:
  """Whether the best row is among the 64 best by the leading KLT dimensions."""
  rows = rows - rows.mean(axis=0)
  values, vectors = np.linalg.eigh(moment)
  values = np.maximum(values, values.max() * 1e-9)
  root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
  spectrum = np.linalg.eigh(root @ (rows.T @ rows / len(rows)) @ root)[1][:, ::-1]
  weight = rows @ (root @ spectrum).astype(np.float32)
  hidden = held["hidden"] @ (inverse @ spectrum).astype(np.float32)
  best = held["tokens"][:, 0]
  found = {}
  for width in PREFILTERS:
    above = np.zeros(len(hidden), np.int64)
    narrow, own = hidden[:, :width], (hidden[:, :width] * weight[best, :width]).sum(axis=1)
    for first in range(0, len(weight), 2**14):
      above += (narrow @ weight[first : first + 2**14, :width].T > own[:, None]).sum(axis=1)
    found[width] = by_text(above < 64, held)
  return found


@dataclasses.dataclass
class _Checked:
  """What a certified head answered for some states, beside all scores of the dense head.

  Attributes:
    first: number of the first state.
    equal: whether the answer has the tokens of the dense head's, for each kind of answer and state.
    in_order: whether it has them in the same order; likewise.
    certain: whether the first pass decided, so that not all rows were scored; likewise.
    survivors: rows in doubt; likewise.
  """

  first: int
  equal: dict
  in_order: dict
  certain: dict
  survivors: dict


FIELDS = "equal", "in_order", "certain", "survivors"


def certified(options, held, head, table, say) -> dict:
  """Answers of a certified head beside brute force, and the rows that were in doubt."""
  made, variables = CertifiedHead.from_dense(head, table)
  path = options.work / "proved.jsonl"
  done = records.read_json_rows(path, _Checked)
  passes = []

  def recorded(*args):
    passes.append(first_pass(*args))
    return passes[-1]

  first_pass = ops.best

  @jax.jit
  def check(variables, hidden, key):
    logits = head.apply({"params": variables["params"]}, hidden)
    noise = sampling.gumbel(jax.random.fold_in(key, 0), logits.shape[::-1]).T
    wide = made.clone(budget=CERTIFIED_BUDGET)
    # What a draw had in doubt is not part of its answer.
    with unittest.mock.patch.object(ops, "best", recorded):
      drawn = made.apply(variables, hidden, key, method="sample")
    found = {
      "best": (made.apply(variables, hidden, 1, method="best"), jnp.argmax(logits, -1)[:, None]),
      "50": (wide.apply(variables, hidden, 50, method="best"), jax.lax.top_k(logits, 50)[1]),
      "sample": (
        passes.pop()._replace(tokens=drawn[:, None]),
        jnp.argmax(logits + noise, axis=-1)[:, None],
      ),
    }
    return {
      name: (
        (jnp.sort(mine.tokens) == jnp.sort(wanted)).all(axis=-1),
        (mine.tokens == wanted).all(axis=-1),
        jnp.broadcast_to(mine.certain, drawn.shape),
        mine.survivors,
      )
      for name, (mine, wanted) in found.items()
    }

  seen = held["hidden"][held["domain"] < len(DOMAINS)]
  size = CERTIFIED_AT_ONCE * CHECKS_AT_ONCE
  count = min(options.certified, len(seen)) // CERTIFIED_AT_ONCE * CERTIFIED_AT_ONCE
  known = {row["first"] for row in done.rows}
  # Spread over the texts, so that the first parts are of all.
  order = np.random.default_rng(0).permutation(len(seen))[:count]
  for first in range(0, count, size):
    if first in known:
      continue
    key = jax.random.fold_in(jax.random.key(1), first)
    parts = [
      check(variables, seen[some], jax.random.fold_in(key, at))
      for at, some in enumerate(order[first : first + size].reshape(-1, CERTIFIED_AT_ONCE))
    ]
    joined = jax.tree.map(lambda *x: np.concatenate(x).tolist(), *parts)
    row = {"first": first} | {
      field: {name: answer[at] for name, answer in joined.items()}
      for at, field in enumerate(FIELDS)
    }
    sealed = records.sealed(row, done.checksums[-1] if done.checksums else "")
    with open(path, "a", encoding="utf-8") as out:
      out.write(records.dumps(sealed))
    done.rows.append(row)
    done.checksums.append(sealed[records.CHECKSUM])
    say(f"certified: {min(count, first + size)} states")
  figures = {"states": count, "at_once": CERTIFIED_AT_ONCE, "budget_50": CERTIFIED_BUDGET}
  for name in done.rows[0]["equal"]:
    equal, in_order, certain, doubt = (
      np.concatenate([row[field][name] for row in done.rows]) for field in FIELDS
    )
    figures[name] = {
      "equal": int(equal.sum()),
      "in_order": int(in_order.sum()),
      "proved": int(certain.sum()),
      "equal_where_proved": int((equal & certain).sum()),
      "median": float(np.median(doubt)),
      "p99": float(np.quantile(doubt, 0.99)),
      "above_256": float((doubt > made.budget).mean()),
    }
  return figures


def times(options, held, head, table, own, trained) -> dict:
  """Milliseconds of a greedy token at batch 1 and 16, medians of interleaved calls."""
  made, codes = CertifiedHead.from_dense(head, table)
  low = {"params": {"weight": jnp.asarray(table["params"]["weight"], jnp.bfloat16)}}
  wide = own.clone(budget=BUDGETS[1])
  heads = {
    "float32": (head, table, jnp.float32),
    "bfloat16": (head.clone(dtype=jnp.bfloat16), low, jnp.bfloat16),
    "certified": (made, codes, jnp.float32),
    f"routed, {BUDGETS[0]} clusters": (own, trained, jnp.float32),
    f"routed, {BUDGETS[1]} clusters": (wide, trained, jnp.float32),
  }
  run = lambda head: jax.jit(lambda v, h: head.apply(v, h, jax.random.key(0), 0.0, method="sample"))
  programs = {name: run(head) for name, (head, _, _) in heads.items()}
  found = {}
  for batch in (1, 16):
    spent = {name: [] for name in heads}
    for repeat in range(options.repeats + 1):
      hidden = held["hidden"][repeat * batch : (repeat + 1) * batch]
      for name, (_, variables, dtype) in heads.items():
        given = jnp.asarray(hidden, dtype)
        begun = time.perf_counter()
        jax.block_until_ready(programs[name](variables, given))
        if repeat:
          spent[name].append(1e3 * (time.perf_counter() - begun))
    found[batch] = {name: float(np.median(x)) for name, x in spent.items()}
  return found


def main() -> int:
  """Run the experiment, or go on with it."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", help="Gemma 3 270M: a GGUF or a folder")
  parser.add_argument("--show", type=pathlib.Path, metavar="JSON", help="print tables of results")
  parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/routed"))
  parser.add_argument("--json", type=pathlib.Path, help="results (default: WORK/results.json)")
  parser.add_argument("--windows", type=int, default=5, help="held-out windows of each text")
  parser.add_argument("--training-windows", type=int, default=40, help="of each domain")
  parser.add_argument("--certified", type=int, default=10_160, help="states that are checked")
  parser.add_argument(
    "--only", nargs="+", choices=PARTS, help="renew these parts of the JSON alone"
  )
  parser.add_argument("--repeats", type=int, default=30, help="calls of which times are medians")
  options = parser.parse_args()
  if options.show:
    print(shown(json.loads(options.show.read_text("utf-8"))))
    return 0
  if not options.model:
    parser.error("--model must be given")
  options.work.mkdir(parents=True, exist_ok=True)
  say = lambda text: print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
  model, variables, _ = checkpoints.load(data_path(options.model, kind="--model"))
  train, held, head, table = collected_states(options, model, variables, say)
  path = options.json or options.work / "results.json"
  write = functools.partial(records.write, path)
  # Keys of JSON are strings.
  keep = lambda: write(json.loads(json.dumps(result)))
  if options.only:
    result = json.loads(path.read_text("utf-8"))
    result.pop(records.CHECKSUM)
    result["renewed"] = {**result.get("renewed", {}), **dict.fromkeys(options.only, provenance())}
    # Which rows a routed head reads does not change how many it reads.
    order = np.random.default_rng(0).permutation(head.vocab)
    own, trained = RoutedHead.from_dense(head, table, order, CLUSTERS, BUDGETS[0])
  else:
    say(f"{len(train['hidden'])} states for training, {len(held['hidden'])} held out")
    result = {"provenance": provenance()}
    result["routed"], own, trained = routed(options, train, held, head, table, say)
    keep()
  if "milliseconds" in (options.only or PARTS):
    result["milliseconds"] = times(options, held, head, table, own, trained)
    keep()
  if "certified" in (options.only or PARTS):
    result["certified"] = certified(options, held, head, table, say)
    keep()
  print(shown(json.loads(json.dumps(result))))
  return 0


def shown(result) -> str:
  """The results as tables in Markdown."""
  line = lambda *cells: f"| {' | '.join(map(str, cells))} |"
  table = lambda columns: [line(*columns), f"|---|{'---:|' * (len(columns) - 1)}"]
  share = lambda part: f"{100 * part:.1f}"
  own, columns = result["routed"], {}
  for budget in map(str, BUDGETS):
    for kind in ("plain", "trained"):
      columns[f"{int(budget) * 128:,} rows, {kind}"] = own[kind][budget]
  columns |= {f"KLT {width}": own["prefilters"][str(width)] for width in PREFILTERS}
  lines = table(["% of the states", *columns])
  rows = {"eight domains": lambda column: column["domains"]}
  rows["the worst of them"] = lambda column: min(column[name] for name in DOMAINS)
  rows |= {f"{name}, unseen": operator.itemgetter(name) for name in UNSEEN}
  for label, of in rows.items():
    lines.append(line(label, *(share(of(column)) for column in columns.values())))
  taken = result["milliseconds"]
  lines += ["", *table(["milliseconds a call", *(f"batch {b}" for b in taken)])]
  for name in taken["1"]:
    lines.append(line(name, *(f"{row[name]:.1f}" for row in taken.values())))
  if "certified" in result:
    found = result["certified"]
    columns = "equal", "in the same order", "proved", "in doubt: median", "99th percentile"
    lines += ["", *table([f"certified, of {found['states']:,}", *columns, "above 256, %"])]
    names = {
      "best": "best token",
      "50": f"50 best, budget {found['budget_50']:,}",
      "sample": "sample of equal noise",
    }
    for name, label in names.items():
      row = found[name]
      counts = (f"{row[key]:,}" for key in ("equal", "in_order", "proved"))
      doubt = f"{row['median']:g}", f"{row['p99']:g}", share(row["above_256"])
      lines.append(line(label, *counts, *doubt))
  return "\n".join(lines)


if __name__ == "__main__":
  exits.run_main(main)
