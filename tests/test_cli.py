"""The console command runs each module of `commands`, and names what an installation lacks."""

import pathlib
import pkgutil
import subprocess
import sys

import pytest

from vqjax import cli, commands


def run(code):
  """Standard output of a Python program in a process of its own."""
  return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_each_module_is_a_command_or_shared_by_commands():
  names = {module.name for module in pkgutil.iter_modules(commands.__path__)}
  assert names == {*cli.COMMANDS, "console", "models", "run_folders"}


def test_arguments_after_the_name_are_those_of_the_command(tmp_path, capsys):
  assert cli.main(["table", str(tmp_path)]) == 2
  assert str(tmp_path) in capsys.readouterr().err
  assert cli.main(["floor", "--help"]) == 0
  assert "--json" in capsys.readouterr().out


def test_help_after_a_config_has_the_options_and_the_fields(capsys):
  config = pathlib.Path(__file__).parents[1] / "configs" / "lm_tied.py"
  assert cli.main(["train", str(config), "--help"]) == 0
  shown = capsys.readouterr().out.split()
  assert {"--run", "--coordinator", "model.dim", "train.steps"} <= {*shown}


def test_a_call_without_a_command_lists_them(capsys):
  assert cli.main([]) == 2
  assert {*cli.COMMANDS} <= {*capsys.readouterr().out.split()}
  with pytest.raises(SystemExit) as stop:
    cli.main(["trian"])
  assert stop.value.code == 2


def test_help_loads_neither_jax_nor_the_lab():
  loaded = run(
    "import sys; from vqjax.cli import main\n"
    "try: main(['--help'])\n"
    "except SystemExit: print('MODULES', *sys.modules)"
  ).stdout.partition("MODULES")[2]
  assert not {"jax", "rich", "flax"} & {*loaded.split()}


@pytest.mark.parametrize(
  ("command", "unneeded"),
  [
    ("table", {"jax", "flax", "numpy", "matplotlib"}),
    ("new", {"jax", "flax", "numpy", "matplotlib"}),
    ("inspect", {"optax", "orbax", "matplotlib", "pandas"}),
  ],
)
def test_a_small_command_loads_only_what_it_needs(command, unneeded):
  loaded = run(f"import sys, vqjax.commands.{command}; print(*sys.modules)").stdout
  assert not unneeded & {*loaded.split()}


def test_a_missing_package_of_the_lab_names_the_extra():
  ran = run(
    "import sys; sys.modules['rich'] = None\n"
    "from vqjax.cli import main; print(main(['table', '.']))"
  )
  assert ran.stdout.split() == ["2"]
  assert "vqjax[lab]" in ran.stderr
