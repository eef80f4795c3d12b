"""Does a study go on where one of its runs failed?"""

from experiments.studies.study import Study, Work


def test_what_starts_from_a_failed_run_is_left_out_and_the_others_go_on(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  made = []

  def work(name, status, *needs):
    def make():
      made.append(name)
      return {"result": {"status": status, "config_hash": name}}

    return Work(name, name, lambda: name, make, needs)

  works = [
    *(work("a/dense", "failed"), work("a/tuned", "finished", "a/dense")),
    *(work("grades/tuned", "finished", "a/tuned"), work("a/grouped", "finished")),
    work("top/grouped", "finished", "a/grouped"),
  ]
  shown = []
  render = lambda console, results, scale: shown.append(set(results))
  study = Study("x", "", ("smoke",), lambda scale: works, render)
  assert study.main(["--scale", "smoke"]) == 0
  assert made == ["a/dense", "a/grouped", "top/grouped"]
  assert shown == [{"a/dense", "a/grouped", "top/grouped"}]
  said = capsys.readouterr().err
  assert "a/tuned is left out: it starts from a/dense, which has no model" in said
  assert "grades/tuned is left out: it starts from a/tuned, which has" in said
