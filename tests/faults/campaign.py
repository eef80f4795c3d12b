"""Runs that are killed, damaged and starved, and what becomes of them.

python -m tests.faults.campaign --json docs/results/faults.json --page docs/results/faults.md

Each trial breaks a training run in one way, then runs the same command again. It ends well if the
run ends bitwise as one that was never broken, or if the command says in one last line what is wrong
and what to do. A silent difference, a hang and a bare traceback are failures.

The modules are imported once; a trial forks this process before JAX has started, and calls the
console command there. Trials that break a command while it imports modules start it afresh.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
SHIM = "VQJAX_FAULTS_SHIM"
"""Environment variable with the library of shim.c, where there is a compiler."""

HANGS = 240.0
"""Seconds after which a command hangs."""

STEPS = 24

CONFIG = """
import pathlib
from tests import tiny
from vqjax import CodebookHead
from vqjax.lab.config import FROM_TOKENIZER


def experiment():
  head = CodebookHead(FROM_TOKENIZER, 16, codes=8, token_bias=True)
  return tiny.experiment(pathlib.Path({text!r}), head, steps={steps}, eval_every=8, save_every=4)
"""

EQUAL, WARNED, CLEAR = "bitwise equal", "bitwise equal, with a warning", "a clear line"
GOOD = (EQUAL, WARNED, CLEAR)
Outcome = tuple[str, str]
"""One of `GOOD`, or the name of a failure; and further words."""


@dataclasses.dataclass
class End:
  """How a command ended: its exit code (None: it hung) and its standard error."""

  code: int | None
  err: str

  @property
  def last(self) -> str:
    """The last line."""
    return (self.err.strip().splitlines() or [""])[-1]

  @property
  def outcome(self) -> Outcome:
    """The outcome of a command that has to fail, with one last line that has a remedy."""
    words = f"code {self.code}: {self.last}"
    if self.code is None:
      return "hang", words
    if "Traceback" in self.err:
      return "traceback", words
    # The remedy is a sentence of its own, or follows a semicolon.
    is_clear = self.code in (1, 2) and re.fullmatch(r"error: .+[.;] \w.+", self.last)
    return (CLEAR if is_clear else "unclear end"), words


class Lab:
  """Starts commands, and compares their runs with one that was never broken."""

  def __init__(self, folder: pathlib.Path):
    """Write the text and the config; make the runs that trials start from."""
    from tests import tiny

    self.folder, self.config, self.whole = folder, folder / "faults.py", folder / "whole"
    text = tiny.write_text(folder / "text")
    self.config.write_text(CONFIG.format(text=str(text), steps=STEPS))
    end = self.train(self.whole)
    assert end.code == 0, end.err
    self.expected = outcome_of(self.whole)
    # Another whole run, whose seconds a trial waits to break one in the middle.
    began = time.monotonic()
    self.train(folder / "timed")
    self.seconds = time.monotonic() - began
    self.stopped = folder / "stopped"
    started = self.start(self.stopped)
    started.wait_for(lambda: rows(self.stopped) >= STEPS * 2 // 3)
    started.kill(signal.SIGTERM)
    assert started.end().code == 128 + signal.SIGTERM

  def call(self, *arguments: object, env: dict[str, str] | None = None, **how: Any) -> "Started":
    """Start `vqjax` with these arguments, and a cache that has the tokens already."""
    own = {"VQJAX_CACHE": str(self.folder / "cache"), "TMPDIR": str(self.folder)}
    return Started([str(argument) for argument in arguments], own | (env or {}), **how)

  def start(self, run: pathlib.Path, *options: object, **how: Any) -> "Started":
    """Start `vqjax train` in a run folder."""
    return self.call("train", self.config, "--run", run, *options, **how)

  def train(self, run: pathlib.Path, *options: object, **how: Any) -> End:
    """Run `vqjax train` in a run folder to its end."""
    return self.start(run, *options, **how).end()

  def judged(self, end: End, run: pathlib.Path) -> Outcome:
    """The outcome of a trial by the end of the command that ran last in its folder."""
    expected = self.expected
    if end.code != 0:
      return end.outcome
    warned = [line for line in end.err.splitlines() if line.startswith("warning: ")]
    try:
      found = outcome_of(run)
    except (ValueError, OSError, TypeError) as error:
      return "silent difference", f"{type(error).__name__}: {error}"
    differs = [name for name in expected if found[name] != expected[name]]
    # Rows of a log that was damaged are lost, which a warning says; the run itself is the same.
    is_said = any("metrics.jsonl" in line for line in warned)
    if differs == ["rows"] and is_said and is_within(found["rows"], expected["rows"]):
      return WARNED, "; ".join(warned)
    if differs:
      return "silent difference", f"in {', '.join(differs)}"
    return (WARNED if warned else EQUAL), "; ".join(warned)

  def again(self, run: pathlib.Path, **env: str) -> Outcome:
    """Run the command once more, and judge the run."""
    return self.judged(self.train(run, env=env), run)


def outcome_of(run: pathlib.Path) -> dict[str, Any]:
  """Everything of a finished run that must be equal bit by bit."""
  from vqjax.lab.run_files import read_metrics, read_result

  result = read_result(run)
  newest = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
  record = json.loads((run / "checkpoints" / str(newest) / "record" / "metadata").read_text())
  position = {name: record["position"][name] for name in ("data", "loss")}
  scores = {split: result[split] for split in ("valid", "test")}
  return {"step": newest, "arrays": record["arrays"], **position, **scores} | {
    "rows": read_metrics(run).rows
  }


def is_within(few: list, many: list) -> bool:
  """Whether `few` is what is left of `many` when some are taken out."""
  rest = iter(many)
  return all(any(row == other for other in rest) for row in few)


class Started:
  """A command in a process of its own: a fork of this one, or a fresh interpreter."""

  def __init__(
    self,
    arguments: Sequence[str],
    env: dict[str, str],
    *,
    fresh: bool = False,
    limits: dict[int, int] | None = None,
  ):
    """Start `vqjax` with these arguments."""
    self.err, self.code = tempfile.TemporaryFile(), None  # noqa: SIM115 (`end` closes it)
    if fresh:
      self.process = subprocess.Popen(
        [sys.executable, "-c", "from vqjax.cli import run; run()", *arguments],
        env=os.environ | env,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=self.err,
        preexec_fn=default_signals,
      )
      self.pid = self.process.pid
    else:
      self.pid = os.fork()
      if self.pid == 0:
        become(arguments, env, self.err.fileno(), limits or {})

  def is_running(self) -> bool:
    """Whether the process has not ended yet."""
    if self.code is None:
      pid, status = os.waitpid(self.pid, os.WNOHANG)
      if pid:
        self.code = os.waitstatus_to_exitcode(status)
    return self.code is None

  def wait_for(self, holds: Callable[[], bool]) -> None:
    """Wait until something holds, or the process has ended."""
    while self.is_running() and not holds():
      time.sleep(0.003)

  def kill(self, signum: int) -> None:
    """Send a signal, unless the process has ended."""
    if self.is_running():
      os.kill(self.pid, signum)

  def end(self) -> End:
    """Wait for the end."""
    # Counted, because this process may be stopped itself for a while.
    waits = int(HANGS / 0.005)
    while self.is_running() and waits > 0:
      time.sleep(0.005)
      waits -= 1
    if self.is_running():
      os.kill(self.pid, signal.SIGKILL)
      os.waitpid(self.pid, 0)
    with self.err:
      self.err.seek(0)
      return End(self.code, self.err.read().decode(errors="replace"))


def default_signals() -> None:
  """Undo what a shell does to the signals of commands in the background."""
  for name in SIGNALS[:4]:
    signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def become(arguments, env, err, limits) -> None:
  """Become the command: the child of a fork."""
  code = 99
  try:
    default_signals()
    # Python's own handler, which a fresh interpreter would have.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(err, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.closerange(3, 256)
    os.environ.update(env)
    tempfile.tempdir = None
    os.chdir(ROOT)
    for limit, value in limits.items():
      resource.setrlimit(limit, (value, value))
    from vqjax.lab import exits

    exits.run_module("vqjax.cli", arguments)
  except SystemExit as stop:
    code = stop.code or 0
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(code)


def content(path: pathlib.Path) -> bytes:
  """What a file holds, or nothing."""
  with contextlib.suppress(OSError):
    return path.read_bytes()
  return b""


def rows(run: pathlib.Path) -> int:
  """The number of whole rows of a run's metrics."""
  return content(run / "metrics.jsonl").count(b"\n")


# --- the trials: (lab, folder of the trial, what distinguishes it) -> outcome ---

SIGNALS = "INT TERM HUP QUIT KILL USR1 USR2 ALRM PIPE ABRT SEGV XCPU".split()  # noqa: SIM905


def signalled(lab: Lab, folder: pathlib.Path, name: str, moment: str, at: float) -> Outcome:
  """A signal at a moment, after a part of the run; then the same command again."""
  run, signum = folder / "run", getattr(signal, f"SIG{name}")
  started, began = lab.start(run, fresh=moment == "importing"), time.monotonic()
  if moment == "importing":
    # Before that, while Python itself starts, the end is Python's own.
    maps = pathlib.Path("/proc", str(started.pid), "maps")
    started.wait_for(lambda: b"jaxlib" in content(maps))
  elif moment == "any":
    started.wait_for(lambda: time.monotonic() - began > at * lab.seconds)
  else:
    step = 8 * (1 + int(at * 2)) if moment == "evaluating" else 1 + int(at * (STEPS - 1))
    started.wait_for(lambda: rows(run) >= step)
  if moment == "saving":
    started.wait_for(lambda: any("tmp" in path.name for path in run.glob("checkpoints/*")))
    time.sleep(at * 0.01)
  started.kill(signum)
  first = started.end()
  if name in SIGNALS[:4]:
    # Not 0 either: a signal that is lost is a failure.
    is_right = first.code == 128 + signum and first.last.startswith("stopped by ")
  else:
    # Python ignores SIGPIPE; at any moment a run may have ended.
    is_right = first.code in ({-signum, 0} if moment == "any" or name == "PIPE" else {-signum})
  return lab.again(run) if is_right and "Traceback" not in first.err else first.outcome


def damage(path: pathlib.Path, way: str, draw: random.Random) -> None:
  """Truncate a file, flip one bit of it, or remove it."""
  content = bytearray(path.read_bytes())
  if way == "removed" or not content:
    return path.unlink()
  at = draw.randrange(len(content))
  if way == "truncated":
    del content[at:]
  else:
    content[at] ^= 1 << draw.randrange(8)
  path.write_bytes(content)


WAYS = ("truncated", "one bit", "removed")


def damaged(
  lab: Lab, folder: pathlib.Path, source: pathlib.Path, file: str, way: str, seed: int
) -> Outcome:
  """A file below a folder damaged: of a run, or of the cache that a run reads."""
  of_cache = source.name == "cache"
  run = shutil.copytree(lab.stopped if of_cache else source, folder / "run")
  cache = shutil.copytree(lab.folder / "cache", folder / "cache")
  damage((cache if of_cache else run) / file, way, random.Random(seed))
  outcome = lab.again(run, VQJAX_CACHE=str(cache))
  if outcome[0] == "silent difference" and source == lab.whole and file != "result.json":
    # A finished run prints its result, and `table` reads the other files.
    return lab.judged(lab.call("table", run).end(), run)
  return outcome


STARVED: dict[str, tuple[Any, ...]] = {
  "full": ("write", 28),
  "input/output error": ("write", 5),
  "quota exceeded": ("write", 122),
  "sync fails": ("sync", 5),
  "rename fails": ("rename", 5),
  "read-only": ("open", 30),
  "size of files": (resource.RLIMIT_FSIZE,),
  "open files": (resource.RLIMIT_NOFILE,),
}
"""What fails: a call to the disk and its error, or a limit of the process."""


def starved(lab: Lab, folder: pathlib.Path, kind: str, value: int) -> Outcome:
  """Run the command where something fails, which it must report, and then where nothing does.

  `value` is the number of calls before the first that fails, or the limit.
  """
  run, env = folder / "run", {"VQJAX_CACHE": str(folder / "cache")}
  if len(STARVED[kind]) == 1:
    first = lab.train(run, env=env, limits={STARVED[kind][0]: value})
  else:
    call, code = STARVED[kind]
    fault = {"PATH": folder, "CALL": call, "ERRNO": code, "AFTER": value}
    first = lab.train(run, env=env | {f"FAULT_{name}": str(x) for name, x in fault.items()})
  if first.code != 0 and first.outcome[0] != CLEAR:
    return first.outcome
  # A limit that leaves enough stops nothing.
  outcome, words = lab.again(run, **env)
  return outcome, f"first {first.outcome[1]} {words}"


def on_another_day(lab: Lab, folder: pathlib.Path, days: int) -> Outcome:
  """A run that is resumed with another date."""
  run = shutil.copytree(lab.stopped, folder / "run")
  outcome = lab.again(run, FAULT_CLOCK=str(days * 86400))
  today = time.strftime("%Y-%m-%d", time.gmtime())
  if outcome[0] in (EQUAL, WARNED) and f'"date": "{today}' in (run / "result.json").read_text():
    return "unclear end", "the clock is not set"
  return outcome


@dataclasses.dataclass(frozen=True)
class Trial:
  """A row of the table, `act(lab, folder of this trial, *case)`, and what is its own of the row."""

  kind: str
  act: Callable[..., Outcome]
  case: tuple

  @property
  def name(self) -> str:
    """The case, without the random parts of names, which another call does not have."""
    words = (str(part) for part in self.case if not isinstance(part, pathlib.Path))
    return re.sub(r"[0-9a-f]{28,}", "...", ", ".join(words))


def trials(lab: Lab, each: int | None) -> list[Trial]:
  """All trials, or at most `each` of a kind."""
  draw = random.Random(0)
  moments = ("any", "saving", "evaluating")

  def files(folder: pathlib.Path, only: str = "*") -> list[tuple]:
    found = sorted(str(p.relative_to(folder)) for p in folder.rglob(only) if p.is_file())
    both = itertools.product(found, WAYS)
    return [(folder, file, way, number) for number, (file, way) in enumerate(both)]

  kinds: dict[str, tuple[Callable[..., Outcome], list[tuple]]] = {
    "SIGKILL at a random moment": (
      signalled,
      [("KILL", moments[i % 3], round(draw.random(), 3)) for i in range(50)],
    ),
    "a file of a stopped run": (damaged, files(lab.stopped)),
    "a file of a finished run": (damaged, files(lab.whole, "*.json*")),
    "a file of the token cache": (damaged, files(lab.folder / "cache")),
    "a signal": (
      signalled,
      [*itertools.product(SIGNALS, ("importing", "training", "saving", "evaluating"), [0.15])],
    ),
    "a disk that fails at the n-th call": (
      starved,
      [*itertools.product([*STARVED][:6], (0, 9, 30, 70))] if SHIM in os.environ else [],
    ),
    "a limit": (
      starved,
      [("size of files", size) for size in (2_000, 6_000, 15_000, 40_000)]
      + [("open files", count) for count in (12, 16, 20, 24)],
    ),
    "the clock set back or forth": (
      on_another_day,
      [(-1,), (-4000,), (4000,)] if SHIM in os.environ else [],
    ),
  }
  return [
    Trial(kind, act, case)
    for kind, (act, cases) in kinds.items()
    for case in (draw.sample(cases, min(each, len(cases))) if each else cases)
  ]


# --- running them ---

_own: dict[str, Any] = {}
"""The lab and the trials, for the workers, which are forks."""


def campaign(options: argparse.Namespace, commit: str | None) -> list[dict[str, Any]]:
  """Run the trials; return a row {"kind", "name", "outcome", "words", "seconds", "commit"} each.

  Trials that ended well at the same commit in an earlier call are not repeated.
  """
  with tempfile.TemporaryDirectory(prefix="vqjax-faults-", ignore_cleanup_errors=True) as folder:
    lab = Lab(pathlib.Path(folder))
    chosen = [trial for trial in trials(lab, options.each) if re.search(options.only, trial.kind)]
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    good = [row for row in rows if row["outcome"] in GOOD and row["commit"] == commit]
    done = {(row["kind"], row["name"]): row for row in good}
    results = [done[key] for trial in chosen if (key := (trial.kind, trial.name)) in done]
    left = [trial for trial in chosen if (trial.kind, trial.name) not in done]
    print(f"{len(left)} of {len(chosen)} trials; a run takes {lab.seconds:.1f} s", flush=True)
    _own.update(lab=lab, trials=left)
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(options.workers, fork) as workers:
      for number, row in enumerate(workers.map(work, range(len(left))), 1):
        results.append(row | {"commit": commit})
        if options.json:
          options.json.parent.mkdir(parents=True, exist_ok=True)
          options.json.write_text(json.dumps(results, indent=1) + "\n")
        line = f"{number}/{len(left)}  {row['kind']}, {row['name']}: {row['outcome']}"
        print(line if row["outcome"] in GOOD else f"{line}: {row['words']}", flush=True)
    return results


def work(number: int) -> dict[str, Any]:
  """Run one trial; return its row."""
  lab, trial = _own["lab"], _own["trials"][number]
  own = lab.folder / f"worker{os.getpid()}" / str(number)
  own.mkdir(parents=True)
  began = time.monotonic()
  try:
    outcome, words = trial.act(lab, own, *trial.case)
  except Exception as error:
    traceback.print_exc()
    outcome, words = "unclear end", f"the campaign itself: {type(error).__name__}: {error}"
  for place in (own, lab.folder, ROOT):
    words = words.replace(str(place), "")
  shutil.rmtree(own, ignore_errors=True)
  row = {"kind": trial.kind, "name": trial.name, "outcome": outcome, "words": words[:600]}
  return row | {"seconds": round(time.monotonic() - began, 2)}


def with_shim() -> None:
  """Start this program again with the library of shim.c loaded first, if it can be made."""
  if SHIM in os.environ:
    return
  library = pathlib.Path(tempfile.mkdtemp(prefix="vqjax-shim-")) / "shim.so"
  source = pathlib.Path(__file__).with_name("shim.c")
  call = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
  try:
    subprocess.run(call, capture_output=True, check=True)
  except (OSError, subprocess.CalledProcessError) as error:
    print(f"no trials of disks and clocks: `cc` must compile {source.name}; got {error}")
    return
  env = os.environ | {SHIM: str(library), "LD_PRELOAD": str(library)}
  os.execve(sys.executable, [sys.executable, "-m", "tests.faults.campaign", *sys.argv[1:]], env)


def table(results: Sequence[dict[str, Any]]) -> str:
  """A Markdown table with a row for each kind of trial."""
  counts: dict[str, Counter] = defaultdict(Counter)
  for row in results:
    for kind in (row["kind"], "all"):
      counts[kind][row["outcome"] if row["outcome"] in GOOD else "failures"] += 1
  counts["all"] = counts.pop("all")  # last
  shown = (*GOOD, "failures")
  lines = [f"| fault | trials | {' | '.join(shown)} |", "|---|" + "---:|" * (len(shown) + 1)]
  for kind, found in counts.items():
    cells = kind, found.total(), *(found[name] for name in shown)
    lines.append(f"| {' | '.join(map(str, cells))} |")
  return "\n".join(lines)


PAGE = """\
# Fault tolerance of training runs

{failures}

A small run is broken on purpose, once a trial, and the command runs again. It must then do one of
three things:

- end bitwise like a run that was never broken (parameters, optimiser, codes, data position,
  metrics, scores);
- end so and warn, naming what was damaged and which rows of a log are lost;
- print one last line that says what is wrong and what to do.

A silent difference, a hang, a traceback, or an end without such a line is a failure.

{table}

`make faults` runs the campaign and the long property-based tests, and writes this page;
`make check` runs a short form of both. A library that is loaded first makes the faults of disks and
clocks (`tests/faults/shim.c`). Trials fork one process that has imported the modules; signals
during imports meet a new interpreter.

Run on {date} with Python {python}, on {machine}, at the one commit {commit}.
"""


def page(results: Sequence[dict[str, Any]], commit: str | None) -> str:
  """The page of a campaign."""
  bad = [row for row in results if row["outcome"] not in GOOD]
  lines = [f"- {r['kind']}, {r['name']}: {r['outcome']} ({r['words'][:200]})" for r in bad]
  return PAGE.format(
    table=table(results),
    failures="\n".join(["Failures:", "", *lines]) if bad else "No trial failed.",
    date=time.strftime("%Y-%m-%d"),
    python=platform.python_version(),
    machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    commit=commit,
  )


def main() -> int:
  """Run the campaign; return 1 if a trial failed."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--each", type=int, metavar="N", help="at most N trials of a kind")
  parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
  parser.add_argument("--only", default="", help="trials whose kind has a match of this")
  parser.add_argument(
    "--json", type=pathlib.Path, help="write all rows to this file; good ones in it are done"
  )
  parser.add_argument("--page", type=pathlib.Path, help="write the page to this file")
  options = parser.parse_args()
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  with_shim()
  # All that a command imports, once and without starting JAX.
  names = "tests.tiny", "orbax.checkpoint", "grain", "tensorboardX", "vqjax.lab.exits"
  for name in (*names, "vqjax.cli", "vqjax.commands.train", "vqjax.commands.table"):
    importlib.import_module(name)
  from vqjax.lab.training import provenance

  warnings.filterwarnings("ignore", message=".*fork.*")
  commit = provenance.commit()
  results = campaign(options, commit)
  print(table(results))
  if options.page:
    options.page.write_text(page(results, commit))
  return int(any(row["outcome"] not in GOOD for row in results))


if __name__ == "__main__":
  sys.exit(main())
