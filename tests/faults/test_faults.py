"""The short form of the campaign of faults: no silent difference, hang or bare traceback."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.faults import campaign

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="trials fork")
def test_broken_runs_end_bitwise_equal_or_with_a_clear_line(tmp_path):
  call = [sys.executable, "-m", "tests.faults.campaign", "--each", "1", "--workers", "2"]
  env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
  done = subprocess.run(
    [*call, "--json", str(tmp_path / "trials.json")],
    cwd=ROOT,
    env=env | {"TMPDIR": str(tmp_path)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  trials = json.loads((tmp_path / "trials.json").read_text())
  # Whether a run of this few ends with a line or a warning depends on where the faults fall.
  outcomes = {trial["outcome"] for trial in trials}
  assert {campaign.EQUAL} <= outcomes <= {*campaign.GOOD}


def test_a_failure_is_in_the_table_and_on_the_page():
  trials = [
    {"kind": "a", "name": "1", "outcome": campaign.EQUAL, "words": ""},
    {"kind": "a", "name": "2", "outcome": "hang", "words": "in a lock"},
    {"kind": "b", "name": "1", "outcome": campaign.CLEAR, "words": ""},
  ]
  assert campaign.table(trials).splitlines()[2:] == [
    "| a | 2 | 1 | 0 | 0 | 1 |",
    "| b | 1 | 0 | 0 | 1 | 0 |",
    "| all | 3 | 1 | 0 | 1 | 1 |",
  ]
  assert "- a, 2: hang (in a lock)" in campaign.page(trials, "c0ffee")
  assert "No trial failed" in campaign.page(trials[:1], "c0ffee")
