"""Models that tests of checkpoints need and that are not part of the repository."""

import os
import pathlib

import pytest

# At import: a fixture of all tests sets VQJAX_CACHE to a folder of its own.
CACHE = pathlib.Path(os.environ.get("VQJAX_CACHE") or pathlib.Path.home() / ".cache" / "vqjax")


@pytest.fixture(scope="session")
def gemma() -> pathlib.Path:
  """Gemma 3 270M as a GGUF; tests that need it are skipped without it."""
  path = CACHE / "gemma-3-270m-q4_k_m.gguf"
  if not path.is_file():
    pytest.skip(f"no {path}: `make gemma` fetches it")
  return path


@pytest.fixture(scope="session")
def tokenizer_files() -> pathlib.Path:
  """Folder of tokenizers of real models; tests that need it are skipped without it."""
  path = CACHE / "tokenizers"
  if not path.is_dir():
    pytest.skip(f"no {path}: `make tokenizers` fetches it")
  return path
