"""Runs that are killed, damaged and starved, and what becomes of them.

python -m tests.faults.campaign --json build/faults.json --page docs/results/faults.md

Each trial breaks a training run in one way, then runs the same command again. It ends well if the
run ends bitwise as one that was never broken, or if the command says in one last line what is wrong
and what to do. A silent difference, a hang and a bare traceback are failures.

The modules are imported once; a trial forks this process before JAX has started, and calls the
console command there. Those that break a command while it imports modules start it afresh. The
command that runs again does so in a process that keeps its compiled programs.
"""

import argparse
import dataclasses
import hashlib
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
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
SHIM = "VQJAX_FAULTS_SHIM"
"""Environment variable with the library of shim.c, where there is a compiler."""

HANGS = 240.0
"""Seconds after which a command hangs."""

STEPS = 24

CONFIG = """
from vqjax import CodebookHead, DenseEmbedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.lm.models import Transformer


def experiment():
  return Experiment(
    name="faults",
    model=Transformer(
      embedding=DenseEmbedding(FROM_TOKENIZER, 16),
      head=CodebookHead(FROM_TOKENIZER, 16, codes=8, token_bias=True),
      dim=16, layers=1, heads=2, context=8, dropout=0.1,
    ),
    data=Text({text!r}, valid_fraction=0.2, test_fraction=0.2),
    tokenizer=WordTokenizer(), loader=Windows(),
    train=Train(
      steps={steps}, batch=4, log_every=1, eval_every=8, save_every=4, warmup=5, keep=2
    ),
  )
"""


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
  def is_clear(self) -> bool:
    """Whether it failed with one last line that has a remedy, and without a traceback."""
    # The remedy is a sentence of its own, or follows a semicolon.
    has_remedy = re.fullmatch(r"error: .+[.;] \w.+", self.last)
    return self.code in (1, 2) and bool(has_remedy) and "Traceback" not in self.err


@dataclasses.dataclass(frozen=True)
class Trial:
  """One way to break a run.

  Attributes:
    kind: the row of the table that it belongs to.
    name: what distinguishes it from the others of its kind.
    act: (lab, folder of this trial) -> (outcome, further words).
  """

  kind: str
  name: str
  act: Callable[["Lab", pathlib.Path], tuple[str, str]]


EQUAL, WARNED, CLEAR = "bitwise equal", "bitwise equal, with a warning", "a clear line"
GOOD = (EQUAL, WARNED, CLEAR)
BAD = ("silent difference", "hang", "traceback", "unclear end")


class Lab:
  """Starts commands, and compares their runs with one that was never broken."""

  def __init__(self, folder: pathlib.Path):
    """Write the text and the config; make the runs that trials start from."""
    from tests import tiny

    self.folder = folder
    self.warm = Warm(folder)
    self.text = tiny.write_text(folder / "text")
    self.config = folder / "faults.py"
    self.config.write_text(CONFIG.format(text=str(self.text), steps=STEPS))
    self.whole = folder / "whole"
    end = self.train(self.whole)
    assert end.code == 0, end.err
    self.expected = self.outcome(self.whole)
    # Another whole run, whose seconds a trial waits to break one in the middle.
    began = time.monotonic()
    self.train(folder / "timed")
    self.seconds = time.monotonic() - began
    self.stopped = folder / "stopped"
    started = self.start(self.stopped)
    started.wait_for(lambda: rows(self.stopped) >= STEPS * 2 // 3)
    started.kill(signal.SIGTERM)
    assert started.end().code == 128 + signal.SIGTERM

  def start(self, run: pathlib.Path, *options: str, fresh: bool = False, **more: Any) -> "Started":
    """Start `vqjax train` in a run folder."""
    env = self.environment | more.pop("env", {})
    return Started(self.arguments(run, *options), env, fresh=fresh, **more)

  def arguments(self, run: pathlib.Path, *options: str) -> list[str]:
    return ["train", str(self.config), "--run", str(run), *options]

  @property
  def environment(self) -> dict[str, str]:
    return {"VQJAX_CACHE": str(self.folder / "cache"), "TMPDIR": str(self.folder)}

  def train(self, run: pathlib.Path, *options: str, **more: Any) -> End:
    """Run `vqjax train` in a run folder to its end."""
    return self.start(run, *options, **more).end()

  def again(self, run: pathlib.Path, **env: str) -> End:
    """Run `vqjax train` to its end where its programs are compiled already."""
    return self.warm.call(self.arguments(run), self.environment | env)

  def outcome(self, run: pathlib.Path) -> dict[str, Any]:
    """Everything of a finished run that must be equal bit by bit."""
    from vqjax.lab.training.run import read_metrics, read_result

    result = read_result(run)
    newest = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
    record = json.loads((run / "checkpoints" / str(newest) / "record" / "metadata").read_text())
    return {
      "step": newest,
      "arrays": record["arrays"],
      "data": record["position"]["data"],
      "loss": record["position"]["loss"],
      "valid": result["valid"],
      "test": result["test"],
      "rows": read_metrics(run).rows,
    }

  def judged(
    self, end: End, run: pathlib.Path, expected: dict[str, Any] | None = None
  ) -> tuple[str, str]:
    """The outcome of a trial by the end of the command that ran last in its folder."""
    expected = expected or self.expected
    if end.code != 0:
      return failed(end)
    warned = [line for line in end.err.splitlines() if line.startswith("warning: ")]
    try:
      found = self.outcome(run)
    except (ValueError, OSError, TypeError) as error:
      return "silent difference", f"{type(error).__name__}: {error}"
    differs = [name for name in expected if found[name] != expected[name]]
    if not differs:
      return (WARNED if warned else EQUAL), "; ".join(warned)
    # Rows of a log that was damaged are lost, which a warning says; the run itself is the same.
    told = any("metrics.jsonl" in line for line in warned)
    if differs == ["rows"] and told and is_within(found["rows"], expected["rows"]):
      return WARNED, "; ".join(warned)
    return "silent difference", f"in {', '.join(differs)}"


def failed(end: End) -> tuple[str, str]:
  """The outcome of a trial whose command did not end well, but should have failed clearly."""
  words = f"code {end.code}: {end.last}"
  if end.code is None:
    return "hang", words
  if "Traceback" in end.err:
    return "traceback", words
  return (CLEAR if end.is_clear else "unclear end"), words


def is_within(few: list, many: list) -> bool:
  """Whether `few` is what is left of `many` when some are taken out."""
  rest = iter(many)
  return all(any(row == other for other in rest) for row in few)


class Started:
  """A command in a process of its own."""

  def __init__(
    self,
    arguments: Sequence[str],
    env: dict[str, str],
    *,
    fresh: bool = False,
    limits: dict[int, int] | None = None,
    devices: int = 1,
  ):
    """Start `vqjax` with these arguments; `fresh`: in a new interpreter, else by a fork."""
    descriptor, path = tempfile.mkstemp(suffix=".err")
    self.path = pathlib.Path(path)
    self.code: int | None = None
    if fresh:
      code = "from vqjax.lab.signals import vqjax; vqjax()"
      self.process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | env,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=descriptor,
        preexec_fn=default_signals,
      )
      self.pid = self.process.pid
    else:
      self.pid = os.fork()
      if self.pid == 0:
        in_child(arguments, env, descriptor, limits or {}, devices)
    os.close(descriptor)

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

  def end(self, timeout: float = HANGS) -> End:
    """Wait for the end."""
    # Counted, because this process may be stopped itself for a while.
    waits = int(timeout / 0.005)
    while self.is_running() and waits > 0:
      time.sleep(0.005)
      waits -= 1
    hung = self.is_running()
    if hung:
      os.kill(self.pid, signal.SIGKILL)
      os.waitpid(self.pid, 0)
    err = self.path.read_text(errors="replace")
    self.path.unlink()
    return End(None if hung else self.code, err)


class Warm:
  """A process that runs commands one after another, and keeps the programs that it compiled.

  A command takes a fraction of the time there. It has the same end as in a process of its own, with
  the signals and the hooks of `exits.run`.
  """

  def __init__(self, folder: pathlib.Path):
    """Start at the first call."""
    self.folder, self.pid = folder, 0

  def call(self, arguments: Sequence[str], env: dict[str, str]) -> End:
    """Run `vqjax` with these arguments to its end."""
    if not self.pid:
      self.mine, theirs = multiprocessing.Pipe()
      self.pid = os.fork()
      if self.pid == 0:
        self.mine.close()
        serve(theirs, self.folder)
      theirs.close()
    self.mine.send((arguments, env))
    # Counted, because this process may be stopped itself for a while.
    waits = int(HANGS)
    while waits and not self.mine.poll(1):
      waits -= 1
    try:
      return End(*(self.mine.recv() if waits else (None, "")))
    except EOFError:
      pid, self.pid = self.pid, 0
      return End(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "the process has died")
    finally:
      if not waits:
        self.close()

  def close(self) -> None:
    """End the process."""
    if self.pid:
      os.kill(self.pid, signal.SIGKILL)
      os.waitpid(self.pid, 0)
      self.pid = 0


def serve(calls, folder: pathlib.Path) -> None:
  """Be the process of `Warm`."""
  code = 1
  try:
    from vqjax import cli
    from vqjax.lab import exits
    from vqjax.lab.config import config_hash
    from vqjax.lab.training import loop

    default_signals()
    exits.prepare()
    programs, costs, Program, loss_cost = {}, {}, loop.Program, loop.loss_cost

    def kept_program(experiment, mesh):
      key = config_hash(experiment), str(mesh)
      if key not in programs:
        programs[key] = Program(experiment, mesh)
      return programs[key]

    def kept_cost(head, tokens):
      key = repr(head), tokens
      if key not in costs:
        costs[key] = loss_cost(head, tokens)
      return costs[key]

    loop.Program, loop.loss_cost = kept_program, kept_cost
    os.chdir(ROOT)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
      arguments, env = calls.recv()
      before = dict(os.environ)
      os.environ.update(env)
      with tempfile.TemporaryFile(dir=folder) as err:
        os.dup2(err.fileno(), 2)
        code = exits.guarded(lambda arguments=arguments: cli.main(arguments))
        sys.stderr.flush()
        err.seek(0)
        calls.send((code, err.read().decode(errors="replace")))
      for name in os.environ.keys() - before.keys():
        del os.environ[name]
      os.environ.update(before)
  except EOFError:
    code = 0
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(code)


def default_signals() -> None:
  """Undo what a shell does to the signals of commands in the background."""
  for name in SIGNALS[:4]:
    signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def in_child(arguments, env, err, limits, devices) -> None:
  """Become the command: the child of a fork."""
  code = 99
  try:
    default_signals()
    # Python's own handler, which a fresh interpreter would have.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(err, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(env)
    tempfile.tempdir = None
    os.chdir(ROOT)
    for limit, value in limits.items():
      resource.setrlimit(limit, (value, value))
    if devices > 1:
      import jax

      jax.config.update("jax_num_cpu_devices", devices)
    from vqjax.lab import exits

    exits.run("vqjax.cli", arguments)
  except SystemExit as stop:
    code = stop.code or 0
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(code)


def rows(run: pathlib.Path) -> int:
  """The number of whole rows of a run's metrics."""
  try:
    return (run / "metrics.jsonl").read_bytes().count(b"\n")
  except OSError:
    return 0


def maps(pid: int) -> bytes:
  """The libraries that a process has loaded."""
  try:
    return pathlib.Path("/proc", str(pid), "maps").read_bytes()
  except OSError:
    return b""


def is_saving(run: pathlib.Path) -> bool:
  """Whether a checkpoint is being written."""
  try:
    return any("tmp" in path.name for path in (run / "checkpoints").iterdir())
  except OSError:
    return False


# --- the trials ---


def kills(draw: random.Random) -> Iterator[Trial]:
  """SIGKILL at random moments: of the whole run, and while a checkpoint is written."""
  for number in range(50):
    at, moment = draw.random(), ("any", "saving", "evaluating")[number % 3]

    def act(lab, folder, at=at, moment=moment):
      run = folder / "run"
      started = lab.start(run)
      if moment == "any":
        deadline = time.monotonic() + at * lab.seconds
        started.wait_for(lambda: time.monotonic() > deadline)
      else:
        step = 1 + int(at * (STEPS - 1)) if moment == "saving" else 8 * (1 + int(at * 2))
        started.wait_for(lambda: rows(run) >= step)
        if moment == "saving":
          started.wait_for(lambda: is_saving(run))
          time.sleep(at * 0.01)
      started.kill(signal.SIGKILL)
      started.end()
      return lab.judged(lab.again(run), run)

    yield Trial("SIGKILL at a random moment", f"{moment} {at:.3f}", act)


def damage(path: pathlib.Path, way: str, draw: random.Random) -> None:
  """Truncate a file, flip one bit of it, or remove it."""
  content = bytearray(path.read_bytes())
  if way == "removed" or not content:
    path.unlink()
    return
  if way == "truncated":
    content = content[: draw.randrange(len(content))]
  else:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
  path.write_bytes(content)


WAYS = ("truncated", "one bit", "removed")


def damaged(
  lab: Lab, kind: str, source: pathlib.Path, draw: random.Random, only: str = "*"
) -> Iterator[Trial]:
  """Files below a folder damaged in three ways: of a run, or of the cache that a run reads."""
  files = sorted(p.relative_to(source) for p in source.rglob(only) if p.is_file())
  seen: Counter = Counter()
  for file, way in itertools.product(files, WAYS):
    # Without the random parts of names, which another call does not have.
    name = f"{way}: {re.sub(r'[0-9a-f]{28,}', '...', str(file))}"
    seen[name] += 1
    seed = draw.random()

    def act(lab, folder, file=file, way=way, seed=seed):
      of_cache = source.name == "cache"
      run = shutil.copytree(lab.stopped if of_cache else source, folder / "run")
      cache = shutil.copytree(lab.folder / "cache", folder / "cache")
      damage((cache if of_cache else run) / file, way, random.Random(seed))
      outcome = lab.judged(lab.again(run, VQJAX_CACHE=str(cache)), run)
      if outcome[0] == "silent difference" and source == lab.whole and file.name != "result.json":
        # A finished run prints its result, and `table` reads the other files.
        outcome = lab.judged(lab.warm.call(["table", str(run)], lab.environment), run)
      return outcome

    yield Trial(kind, name if seen[name] == 1 else f"{name} ({seen[name]})", act)


def damaged_compact(draw: random.Random) -> Iterator[Trial]:
  """A compact file, damaged."""
  for number in range(30):
    way, seed = WAYS[number % 3], draw.random()

    def act(lab, folder, way=way, seed=seed):
      import numpy as np

      from vqjax.embeddings.compact import CompactEmbedding
      from vqjax.embeddings.compact_file import open_compact

      path, random_ = folder / "x.safetensors", np.random.default_rng(0)
      made = CompactEmbedding(
        random_.integers(0, 256, 2000 * 8 // 2, np.uint8),
        random_.standard_normal((8, 16, 4), np.float32),
        vocab=2000,
        dim=32,
        codes=16,
        subspaces=8,
        additive=False,
        bias=random_.standard_normal(2000, np.float32),
      )
      made.save(path)
      expected = open_compact(path)[np.arange(2000)]
      damage(path, way, random.Random(seed))
      try:
        found = open_compact(path)
      except (ValueError, OSError) as error:
        return (CLEAR if str(path) in str(error) else "unclear end"), str(error)
      same = np.array_equal(found[np.arange(2000)], expected)
      same &= np.array_equal(found.bias, made.bias)
      return (EQUAL if same else "silent difference"), ""

    yield Trial("a compact file", f"{way} {seed:.3f}", act)


SIGNALS = (
  "INT",
  "TERM",
  "HUP",
  "QUIT",
  "KILL",
  "USR1",
  "USR2",
  "ALRM",
  "PIPE",
  "ABRT",
  "SEGV",
  "XCPU",
)
MOMENTS = ("importing", "training", "saving", "evaluating")


def signals() -> Iterator[Trial]:
  """Signals at four moments, then the same command again."""
  for name, moment in itertools.product(SIGNALS, MOMENTS):

    def act(lab, folder, name=name, moment=moment):
      run, signum = folder / "run", getattr(signal, f"SIG{name}")
      started = lab.start(run, fresh=moment == "importing")
      if moment == "importing":
        # Before that, while Python itself starts, the end is Python's own.
        started.wait_for(lambda: b"jaxlib" in maps(started.pid))
      else:
        step = {"training": 5, "saving": 4, "evaluating": 8}[moment]
        started.wait_for(lambda: rows(run) >= step)
        if moment == "saving":
          started.wait_for(lambda: is_saving(run))
      started.kill(signum)
      first = started.end()
      if name in SIGNALS[:4]:
        # Not 0 either: a signal that is lost is a failure.
        is_right = first.code == 128 + signum and first.last.startswith("stopped by ")
      else:
        is_right = first.code == (0 if name == "PIPE" else -signum)  # Python ignores SIGPIPE
      if not is_right or "Traceback" in first.err:
        return failed(first)
      return lab.judged(lab.again(run), run)

    yield Trial("a signal", f"SIG{name}, {moment}", act)


DISKS = {
  "full": ("write", 28),
  "input/output error": ("write", 5),
  "quota exceeded": ("write", 122),
  "sync fails": ("sync", 5),
  "rename fails": ("rename", 5),
  "read-only": ("open", 30),
}


def disks() -> Iterator[Trial]:
  """Disks that fail from the n-th call on, then the same command on a good one."""
  for (kind, (call, code)), place in itertools.product(DISKS.items(), (0, 9, 30, 70)):

    def act(lab, folder, call=call, code=code, place=place):
      env = {"FAULT_PATH": str(folder), "FAULT_CALL": call, "FAULT_ERRNO": str(code)}
      env |= {"FAULT_AFTER": str(place), "VQJAX_CACHE": str(folder / "cache")}
      return broken_then_whole(lab, folder, env=env)

    if SHIM in os.environ:
      yield Trial("a disk that fails at the n-th call", f"{kind}, n = {place + 1}", act)


def broken_then_whole(lab, folder, env=None, **more) -> tuple[str, str]:
  """Run the command where something fails, which it must report, and then where nothing does."""
  run, env = folder / "run", env or {}
  cache = {name: value for name, value in env.items() if name == "VQJAX_CACHE"}
  first = lab.train(run, env=env, **more)
  if not first.is_clear:
    return failed(first)
  outcome, words = lab.judged(lab.again(run, **cache), run)
  return outcome, f"first {failed(first)[1]} {words}"


def limits() -> Iterator[Trial]:
  """Limits on the size of files and on the number of open files."""
  for kind, name, values in (
    (resource.RLIMIT_FSIZE, "size of files", (2_000, 6_000, 15_000, 40_000)),
    (resource.RLIMIT_NOFILE, "open files", (12, 16, 20, 24)),
  ):
    for value in values:

      def act(lab, folder, kind=kind, value=value):
        return broken_then_whole(lab, folder, limits={kind: value})

      yield Trial("a limit", f"{name}: {value}", act)


def together() -> Iterator[Trial]:
  """Several processes on one folder, and on one new cache."""
  for number in range(4):

    def act(lab, folder, number=number):
      run = folder / "run"
      first = lab.start(run)
      first.wait_for(lambda: rows(run) >= number)
      second = lab.start(run)
      pids, ends = [first.pid, second.pid], [first.end(), second.end()]
      # At the same moment either may be first, and the other see a lock without a name.
      winner = int(ends[0].code != 0) if number == 0 else 0
      refused, holder = ends[1 - winner], f": process {pids[winner]} on " if number else ""
      if f"another process is running in {run}{holder}" not in refused.last or refused.code != 2:
        return "unclear end", f"code {refused.code}: {refused.last}"
      return lab.judged(ends[winner], run)

    yield Trial("two processes on one folder", f"{number}", act)

    def at_once(lab, folder):
      env = {"VQJAX_CACHE": str(folder / "cache")}
      started = [lab.start(folder / f"run{i}", env=env) for i in range(3)]
      outcomes = [lab.judged(s.end(), folder / f"run{i}") for i, s in enumerate(started)]
      return next((o for o in outcomes if o[0] not in GOOD), outcomes[0])

    if number % 2:
      yield Trial("three processes write one cache", f"{number}", at_once)


def removed() -> Iterator[Trial]:
  """The run folder, or all checkpoints, removed."""
  for number in range(3):

    def act(lab, folder, number=number):
      run = folder / "run"
      started = lab.start(run)
      started.wait_for(lambda: rows(run) > 3 * number)
      run.rename(folder / "moved")
      first = started.end()
      if not first.is_clear:
        return failed(first)
      shutil.rmtree(run, ignore_errors=True)
      return lab.judged(lab.again(run), run)

    yield Trial("the folder removed under a run", f"after row {3 * number}", act)
  for what in ("checkpoints", "checkpoints and progress.json", "newest checkpoint"):

    def lost(lab, folder, what=what):
      run = shutil.copytree(lab.stopped, folder / "run")
      steps = sorted((run / "checkpoints").iterdir(), key=lambda p: int(p.name))
      for path in steps[-1:] if what.startswith("newest") else steps:
        shutil.rmtree(path)
      if "progress" in what:
        (run / "progress.json").unlink()
      return lab.judged(lab.again(run), run)

    yield Trial("lost checkpoints", what, lost)


def clocks() -> Iterator[Trial]:
  """A run that is resumed with another date."""
  for days in (-1, -4000, 4000):

    def act(lab, folder, days=days):
      run = shutil.copytree(lab.stopped, folder / "run")
      end = lab.again(run, FAULT_CLOCK=str(days * 86400))
      outcome, words = lab.judged(end, run)
      today = time.strftime("%Y-%m-%d", time.gmtime())
      if outcome in (EQUAL, WARNED) and f'"date": "{today}' in (run / "result.json").read_text():
        return "unclear end", "the clock is not set"
      return outcome, words

    if SHIM in os.environ:
      yield Trial("the clock set back or forth", f"{days} days", act)


def several() -> Iterator[Trial]:
  """Two processes of one run, killed, and resumed by one, or by two."""
  for number in range(6):

    def act(lab, folder, number=number):
      options = ("train.mesh.data=2",)
      with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = folder.parent / "whole-2"  # of this worker
        if not (whole / "result.json").exists():
          end = lab.train(whole, *options, devices=2)
          assert end.code == 0, end.err
        run = folder / "run"
        pair = start_pair(lab, run, options)
        pair[0].wait_for(lambda: rows(run) >= 6 + 3 * number)
        pair[number % 2].kill(signal.SIGKILL)
        left = [started.end() for started in pair][1 - number % 2]
        if not left.is_clear:
          return failed(left)
        if number % 3 < 2:
          end = lab.train(run, *options, devices=2)
        else:
          first, second = (s.end() for s in start_pair(lab, run, options))
          end = first if first.code else End(second.code, first.err + second.err)
      return lab.judged(end, run, lab.outcome(whole))

    again = "two" if number % 3 == 2 else "one"
    yield Trial("one of two processes killed, resumed by one or two", f"{number}, by {again}", act)


def start_pair(lab: Lab, run: pathlib.Path, options: Sequence[str]) -> list[Started]:
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    port = found.getsockname()[1]
  group = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--silence", "8"]
  return [lab.start(run, *options, *group, "--process-id", str(i)) for i in range(2)]


def trials(lab: Lab, seed: int, each: int | None) -> list[Trial]:
  """All trials, or at most `each` of a kind."""
  draw = random.Random(seed)
  chosen = [
    *kills(draw),
    *damaged_compact(draw),
    # After those whose names are drawn: the number of files differs from call to call.
    *damaged(lab, "a file of a stopped run", lab.stopped, draw),
    *damaged(lab, "a file of a finished run", lab.whole, draw, only="*.json*"),
    *damaged(lab, "a file of the token cache", lab.folder / "cache", draw),
    *signals(),
    *disks(),
    *limits(),
    *together(),
    *removed(),
    *clocks(),
    *several(),
  ]
  if each is None:
    return chosen
  kinds: dict[str, list[Trial]] = defaultdict(list)
  for trial in chosen:
    kinds[trial.kind].append(trial)
  return [t for some in kinds.values() for t in draw.sample(some, min(each, len(some)))]


# --- running them ---


def campaign(
  seed: int, workers: int, only: str, each: int | None, kept: pathlib.Path | None, commit: str
) -> list[dict[str, Any]]:
  """Run the trials; return a row {"kind", "name", "outcome", "words", "seconds"} for each.

  Trials that ended well at the same commit in an earlier call are not repeated.
  """
  preload()
  folder = pathlib.Path(tempfile.mkdtemp(prefix="vqjax-faults-"))
  try:
    lab = Lab(folder)
    chosen = [trial for trial in trials(lab, seed, each) if re.search(only, trial.kind)]
    done = {}
    if kept is not None and kept.exists():
      earlier = map(json.loads, kept.read_text().splitlines())
      good = [row for row in earlier if row["outcome"] in GOOD and row["commit"] == commit]
      done = {(row["kind"], row["name"]): row for row in good}
      kept.write_text("".join(json.dumps(row) + "\n" for row in done.values()))
    left = [t for t in chosen if (t.kind, t.name) not in done]
    before = f"{len(chosen) - len(left)} done before; a run takes {lab.seconds:.1f} s"
    print(f"{len(chosen)} trials for {workers} workers, {before}", flush=True)
    results = kept or folder / "rows.jsonl"
    results.touch()
    children = []
    for worker in range(workers):
      pid = os.fork()
      if pid == 0:
        code = 1
        try:
          work(lab, left[worker::workers], folder / f"worker{worker}", results, commit)
          code = 0
        except BaseException:
          traceback.print_exc()
        finally:
          os._exit(code)
      children.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    if any(codes):
      raise RuntimeError("a worker of the campaign failed")
    names = {(trial.kind, trial.name) for trial in chosen}
    found = map(json.loads, results.read_text().splitlines())
    return [row for row in found if (row["kind"], row["name"]) in names]
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def work(
  lab: Lab, mine: Sequence[Trial], folder: pathlib.Path, results: pathlib.Path, commit: str
) -> None:
  """Run trials one after another; append a row for each."""
  for number, trial in enumerate(mine, 1):
    own = folder / str(number)
    own.mkdir(parents=True)
    began = time.monotonic()
    try:
      outcome, words = trial.act(lab, own)
    except Exception as error:
      traceback.print_exc()
      outcome, words = "unclear end", f"the campaign itself: {type(error).__name__}: {error}"
    seconds = round(time.monotonic() - began, 2)
    for place in (own, lab.folder, ROOT):
      words = words.replace(str(place), "")
    row = {"kind": trial.kind, "name": trial.name, "outcome": outcome, "words": words[:600]}
    with results.open("a") as file:
      file.write(json.dumps(row | {"seconds": seconds, "commit": commit}) + "\n")
    line = f"{number}/{len(mine)}  {trial.kind}, {trial.name}: {outcome}"
    print(line if outcome in GOOD else f"{line}: {words[:600]}", flush=True)
    shutil.rmtree(own, ignore_errors=True)
  lab.warm.close()


def preload() -> None:
  """Import everything that a command imports, without starting JAX."""
  for name in ("orbax.checkpoint", "grain", "tensorboardX", "vqjax.lm.models"):
    importlib.import_module(name)
  for name in ("train", "table"):
    importlib.import_module(f"vqjax.commands.{name}")
  warnings.filterwarnings("ignore", message=".*fork.*")


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
    counts[row["kind"]][row["outcome"]] += 1
  shown = [*GOOD, "failures"]
  lines = [f"| fault | trials | {' | '.join(shown)} |", "|---|" + "---:|" * (len(shown) + 1)]
  total: Counter = Counter()
  for kind, found in [*counts.items(), ("all", None)]:
    found = total if found is None else found
    bad = sum(found[name] for name in BAD)
    cells = [found.total(), *(found[name] for name in GOOD), bad]
    lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    total = total if kind == "all" else total + found
  return "\n".join(lines)


PAGE = """\
# Faults

A small run is broken on purpose, once in each trial, and then the same command is run again. A
trial ends well in one of three ways: the run ends bitwise like one that was never broken
(parameters, optimiser, codes, data position, all rows of the metrics, and the scores); it does so
and a warning says what was damaged, and for a damaged log which of its rows are lost; or the
command prints one last line that says what is wrong and what to do. A silent difference, a hang, a
traceback and an end without such a line are failures.

{table}

{failures}

`make faults` runs the campaign and the long form of the property-based tests, and writes this page;
`make test-all` has a short form of both. The faults of disks and of the clock are those of a
library that is loaded before the others (`tests/faults/shim.c`). Trials fork one process that has
imported the modules; signals during imports meet a new interpreter. The command that is run again
does so in a process that keeps its compiled programs.

Run on {date} with Python {python}, on {machine}, at the one commit {commit}. Digest of the trials:
{digest}.
"""


def page(results: Sequence[dict[str, Any]], commit: str) -> str:
  """The page of a campaign."""
  bad = [row for row in results if row["outcome"] in BAD]
  lines = [f"- {r['kind']}, {r['name']}: {r['outcome']} ({r['words'][:200]})" for r in bad]
  failures = "\n".join(["Failures:", "", *lines]) if bad else "No trial failed."
  key = json.dumps(sorted((r["kind"], r["name"], r["outcome"]) for r in results))
  return PAGE.format(
    table=table(results),
    failures=failures,
    date=time.strftime("%Y-%m-%d"),
    python=platform.python_version(),
    machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    commit=commit,
    digest=hashlib.sha256(key.encode()).hexdigest()[:12],
  )


def main() -> int:
  """Run the campaign; return 1 if a trial failed."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--each", type=int, metavar="N", help="at most N trials of a kind")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
  parser.add_argument("--only", default="", help="trials whose kind has a match of this")
  parser.add_argument("--rows", type=pathlib.Path, help="keep rows here; those in it are done")
  parser.add_argument("--json", type=pathlib.Path, help="write all rows to this file")
  parser.add_argument("--page", type=pathlib.Path, help="write the page to this file")
  options = parser.parse_args()
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  with_shim()
  # In a process of its own: to ask for the commit starts JAX, and this one is not to.
  code = "from vqjax.lab.training.provenance import commit; print(commit())"
  commit = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
  results = campaign(
    options.seed, options.workers, options.only, options.each, options.rows, commit
  )
  print(table(results))
  if options.json:
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
  if options.page:
    options.page.write_text(page(results, commit))
  return int(any(row["outcome"] in BAD for row in results))


if __name__ == "__main__":
  sys.exit(main())
