"""A command ends with one last line and its exit code, whatever stops it."""

import errno
import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from vqjax.lab import exits, signals
from vqjax.lab.training import NotFiniteError


@pytest.fixture
def ended(tmp_path):
  """Runs `main(arguments)` of a module, by `exits.run_module`: -> code, lines of stderr."""

  def end(body, signum=None):
    code = f"import sys, time\nprint('started', flush=True)\n{textwrap.dedent(body)}"
    (tmp_path / "program.py").write_text(code)
    run = "from vqjax.lab import exits; exits.run_module('program', [])"
    process = subprocess.Popen(
      [sys.executable, "-c", run],
      env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "TMPDIR": str(tmp_path)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      preexec_fn=lambda: [signal.signal(s, signal.SIG_DFL) for s in signals.STOPS],
    )
    if signum is not None:
      assert process.stdout.readline() == "started\n"
      process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    return process.returncode, err.splitlines()

  return end


@pytest.mark.parametrize("signum", signals.STOPS)
def test_a_signal_while_modules_are_imported_is_one_line(ended, signum):
  # An import that swallows exceptions, as some do.
  body = """
  for _ in range(100):
    try: time.sleep(0.1)
    except BaseException: pass
  """
  code, lines = ended(body, signum)
  assert code == 128 + signum
  assert lines == [f"stopped by {signum.name}. Run the same command again to resume."]


COMMANDS = {
  "vqjax": ["-c", "from vqjax.cli import run; run()", "train", "configs/lm_dense.py"],
  "train": ["-m", "vqjax.cli", "train", "configs/lm_dense.py"],
  "demo": ["-m", "experiments.demo"],
  "bench": ["-m", "experiments.bench"],
  "plan": ["-m", "experiments.plan.scaling"],
  "study": ["-m", "vqjax.cli", "study", "experiments/studies/vq_logits/web.py"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_a_command_imports_jax_is_one_line(name, tmp_path):
  (tmp_path / "jax.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
  done = subprocess.run(
    [sys.executable, *COMMANDS[name]],
    env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
    capture_output=True,
    text=True,
    check=False,
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
  )
  assert done.returncode == 130
  assert done.stderr == "stopped by SIGINT. Run the same command again to resume.\n"


def test_a_signal_under_nohup_is_ignored(tmp_path):
  ignore = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
  body = "main = lambda arguments: os.kill(os.getpid(), signal.SIGHUP) or 7"
  (tmp_path / "program.py").write_text(f"import os, signal\n{body}")
  done = subprocess.run(
    [
      sys.executable,
      "-c",
      f"{ignore} from vqjax.lab import exits; exits.run_module('program', [])",
    ],
    env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
    check=False,
  )
  assert done.returncode == 7


def test_noise_of_threads_and_callbacks_is_in_the_log_and_not_on_the_screen(ended, tmp_path):
  code, lines = ended(
    """
  import threading
  class Loud:
    def __del__(self): raise RuntimeError("from a destructor")
  def main(arguments):
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    del Loud
    raise OSError(28, "No space left")
  """.replace("del Loud", "Loud()")
  )
  assert code == 2
  (line,) = lines
  (log,) = tmp_path.glob("vqjax-*.log")
  assert line == f"error: [Errno 28] No space left (more in {log})"
  assert "ZeroDivisionError" in log.read_text()
  assert "from a destructor" in log.read_text()


def test_threads_that_hang_do_not_keep_a_failed_command(ended):
  began = time.monotonic()
  code, _ = ended("""
  import threading
  def main(arguments):
    threading.Thread(target=lambda: time.sleep(100)).start()
    return 2
  """)
  assert code == 2
  assert time.monotonic() - began < 50


@pytest.mark.parametrize(
  ("error", "code", "part"),
  [
    (ValueError("x"), 2, "error: x"),
    (ValueError("NOT_FOUND: Error opening\n a file"), 2, "opening. Check the folder and its disk,"),
    (ValueError("Cannot read x.\nSee\nTensorStore({\n})."), 2, "read x. Check the folder and its"),
    (OSError(errno.EMFILE, "Too many open files"), 2, "files. Raise the limit on open files"),
    (NotFiniteError("loss is nan"), 1, "error: loss is nan"),
    (MemoryError(), 1, "out of memory (MemoryError). Use a machine with more memory"),
    (RuntimeError("RESOURCE_EXHAUSTED: 3 GB"), 1, "out of memory (RESOURCE_EXHAUSTED"),
    (KeyError("a bug"), 1, "KeyError: 'a bug'. Run again; if it comes again, report it. (more in "),
    (OverflowError("a bug"), 1, "OverflowError: a bug."),
    (KeyboardInterrupt(), 130, "stopped by SIGINT."),
    (signals.Stopped(signal.SIGHUP), 129, "stopped by SIGHUP."),
    (SystemExit(2), 2, ""),
    (ValueError("\x1b[31mred"), 2, "error: \\x1b[31mred"),
  ],
)
def test_an_error_is_one_line_and_a_code(error, code, part, capsys, tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

  def fail():
    raise error

  assert exits.guarded(fail) == code
  err = capsys.readouterr().err
  assert part in err
  assert err.count("\n") == bool(part)


@pytest.mark.parametrize(
  ("command", "work", "options", "is_training"),
  [
    ("train", "_train", ["configs/lm_dense.py"], True),
    ("cluster", "_compress", ["configs/lm_dense.py", "run"], True),
    ("corpus", "_print_counts", ["configs/lm_dense.py"], False),
    ("generate", "_generate", ["model", "--prompt", "a"], False),
    (
      "compress",
      "check_different",
      ["model", "--kl", "1", "--text", __file__, "--out", "o"],
      False,
    ),
  ],
)
def test_the_remedy_of_exhausted_memory_is_one_of_the_command(
  command, work, options, is_training, capsys, tmp_path, monkeypatch
):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  module = importlib.import_module(f"vqjax.commands.{command}")

  def fail(*arguments):
    raise MemoryError

  monkeypatch.setattr(module, work, fail)
  assert module.main(options) == 1
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith("error: out of memory (MemoryError). ")
  assert ("train.batch" in line) == is_training


def test_a_limit_on_addresses_that_would_end_in_a_crash_is_refused(ended):
  limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9));"
  run = f"{limit} from vqjax.lab import exits; exits.run_module('program', [])"
  done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
  assert done.returncode == 2
  assert done.stderr.startswith("error: the limit on addresses must be at least")


def test_a_platform_that_jax_does_not_have_is_named(ended, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "foo")
  code, lines = ended("main = lambda arguments: __import__('jax').devices()")
  assert code == 2
  assert lines == [
    "error: `JAX_PLATFORMS` must name platforms that JAX has here; got 'foo'. Unset it, or set it"
    " to cpu."
  ]


def test_a_name_with_the_end_of_a_line_stays_in_the_last_line(monkeypatch):
  name = "a\nerror: b\x1b[31m"
  monkeypatch.setattr(sys, "argv", ["vqjax", "inspect", name])
  code, message = exits.explained(ValueError(f"`path` must exist; got {name}. Give another one."))
  assert (code, message) == (
    2,
    "`path` must exist; got a\\nerror: b\\x1b[31m. Give another one.",
  )
