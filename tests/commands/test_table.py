"""The command prints and writes tables, and refuses a wrong folder."""

from vqjax.commands.table import main


def test_the_command_prints_a_table_and_writes_each_file(demo, tmp_path, capsys):
  out = tmp_path / "out"
  options = ["--html", f"{out}/t.html", "--markdown", f"{out}/t.md", "--png", f"{out}/t.png"]
  assert main([str(demo), *options]) == 0
  assert "codebook" in capsys.readouterr().out
  names = sorted(file.name for file in out.iterdir())
  assert names == ["t-loss.png", "t.html", "t.md", "t.png"]


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
  assert main([str(tmp_path)]) == 2
  assert "must hold runs; got" in capsys.readouterr().err
  assert main([str(tmp_path / "nowhere")]) == 2
  assert "must be a folder with runs; got" in capsys.readouterr().err


def test_damage_is_an_error_without_a_traceback(demo, capsys):
  (demo / "a_dense" / "result.json").write_text("{")
  assert main([str(demo)]) == 2
  assert "result.json is damaged: line 1" in capsys.readouterr().err
