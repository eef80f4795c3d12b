"""Check of a wheel: its contents, and what an installation of it does outside of the checkout.

python tests/wheel.py dist/vqjax-0.1.0-py3-none-any.whl

The programs of README.md and of the quick start run with the library alone; then the config of
docs/training.md goes through the commands of the lab.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
SMALL = (
  *("model.dim=16", "model.layers=1", "model.head.codes=7", "tokenizer.min_count=1"),
  *("model.context=8", "train.steps=4", "train.warmup=1", "data.path=text"),
)


def main(wheel: pathlib.Path) -> None:
  """Raise AssertionError, or CalledProcessError, where the wheel is not as it should be."""
  check_contents(wheel)
  with tempfile.TemporaryDirectory() as folder:
    check_installation(wheel.resolve(), pathlib.Path(folder))
  print(f"{wheel.name}: installs, and works without the checkout")


def check_contents(wheel: pathlib.Path) -> None:
  """Check that a wheel has the types and the lab, and nothing beside the package."""
  names = zipfile.ZipFile(wheel).namelist()
  tops = {name.partition("/")[0] for name in names}
  assert {top for top in tops if not top.endswith(".dist-info")} == {"vqjax"}, tops
  assert {"vqjax/py.typed", "vqjax/__init__.pyi", "vqjax/commands/train.py"} <= {*names}
  assert not [name for name in names if "test" in pathlib.PurePath(name).name], names


def check_installation(wheel: pathlib.Path, folder: pathlib.Path) -> None:
  """Install a wheel in a fresh environment below `folder`, and use it there."""
  venv.create(folder / "venv", with_pip=True)
  programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
  env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX", "XLA"))}
  env |= {"JAX_PLATFORMS": "cpu", "VQJAX_CACHE": str(folder / "cache")}

  def run(program: str, *arguments: str, code: int = 0) -> str:
    print("$", program, *arguments, flush=True)
    done = subprocess.run(
      [programs / program, *arguments], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr

  def install(requirement: str) -> None:
    constraints = str(ROOT / "constraints.txt")
    run("python", "-m", "pip", "install", "-q", "-c", constraints, requirement)

  install(str(wheel))
  (folder / "readme.py").write_text("\n".join(snippets("README.md")))
  printed = run("python", "readme.py")
  assert "bits a weight" in printed, printed
  assert "parameters" in printed, printed
  (folder / "quickstart.py").write_text("\n".join(snippets("docs/quickstart.md")))
  assert "a dense head" in run("python", "quickstart.py")
  assert "vqjax[lab]" in run("vqjax", "train", code=2)

  install(f"{wheel}[lab]")
  write_text(folder / "text")
  codebook = snippets("docs/training.md")[0]
  (folder / "codebook.py").write_text(codebook)
  assert "train" in run("vqjax", "--help")
  assert "nats/token" in run("vqjax", "train", "codebook.py", *SMALL, "--run", "runs/codebook")
  assert "codebook" in run("vqjax", "table", "runs")
  assert "Perplexity floor" in run("vqjax", "floor", "codebook.py", *SMALL)
  assert "vocabulary" in run("vqjax", "corpus", "codebook.py", *SMALL)
  assert "Memory" in run("vqjax", "plan", "codebook.py", *SMALL, "--devices=2", "--vocab=64")

  (folder / "dense.py").write_text(
    re.sub(r"CodebookHead\((.*), codes=\d+\)", r"DenseHead(\1)", codebook).replace(
      "import CodebookHead", "import DenseHead"
    )
  )
  dense = [change for change in SMALL if "codes" not in change]
  run("vqjax", "train", "dense.py", *dense, "--run", "runs/dense")
  options = "--codes=7", "--out=runs/small"
  assert "head: " in run("vqjax", "cluster", "dense.py", "runs/dense", *options, *dense)


def snippets(page: str) -> list[str]:
  """The blocks of Python of a page, or its cells."""
  return re.findall(
    r"```(?:python|\{code-cell\} ipython3)\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL
  )


def write_text(folder: pathlib.Path) -> None:
  """Write a text of some sixty words, a file for each split."""
  folder.mkdir()
  for split, words in (("train", 3000), ("valid", 700), ("test", 700)):
    (folder / f"{split}.txt").write_text(" ".join(f"w{n * n % 61}" for n in range(words)))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
