"""Results name the commit whose code made them."""

import subprocess

from vqjax.lab.training import provenance


def test_changed_code_is_marked_and_written_results_are_not(tmp_path, monkeypatch):
  code, results = tmp_path / "vqjax/lab/training/step.py", tmp_path / "studies/results.jsonl"
  for file in (code, results):
    file.parent.mkdir(parents=True)
    file.write_text("before")
  identity = "-c", "user.name=somebody", "-c", "user.email=somebody@example.org"
  for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "files")):
    subprocess.run(["git", *command], cwd=tmp_path, check=True)
  monkeypatch.setattr(provenance, "__file__", str(code))
  clean = provenance.commit()
  assert len(clean) == 12
  results.write_text("after")
  assert provenance.commit() == clean
  code.write_text("after")
  assert provenance.commit() == clean + "+"
