"""Processes for the tests of studies."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def smoke(tmp_path, monkeypatch):
  """Runs jobs of a study at the smoke scale: (study, names) -> what it printed.

  In a process of its own, because the batches are smaller than the simulated devices. The test then
  goes on in the folder of the process.
  """

  def run(study, names):
    arguments = ["--scale", "smoke", "--only", names]
    done = subprocess.run(
      [sys.executable, "-m", f"experiments.studies.{study}.run", *arguments],
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
