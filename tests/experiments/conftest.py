"""Processes for the tests of studies."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def process(tmp_path, monkeypatch):
  """Runs a module in the folder of the test: (module, *arguments) -> what it printed.

  In a process of its own, because the batches are smaller than the simulated devices. The test then
  goes on in the folder.
  """

  def run(*arguments):
    done = subprocess.run(
      [sys.executable, "-m", *arguments],
      cwd=tmp_path,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    return done.stdout

  return run
