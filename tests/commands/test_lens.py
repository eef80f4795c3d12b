"""`vqjax lens MODEL`: a table, a page, and a lens that is fitted, resumed and refused elsewhere."""

import contextlib
import io
import json
import re

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.commands.test_compress import model_folder
from tests.lm.checkpoints.families import V
from vqjax.commands import lens
from vqjax.lm.lenses import Readings, fitting
from vqjax.lm.lenses.reading_page import Reading, write_reading_page

pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")

PROMPT = "w1 w2 w3 w4 w5 w6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return model_folder("gemma3_text", tmp_path_factory.mktemp("lens") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  path = tmp_path_factory.mktemp("text") / "text.txt"
  path.write_text(" ".join(f"w{n}" for n in np.random.default_rng(0).integers(0, V - 7, 1500)))
  return path


def fit(folder, text, out, *options):
  sizes = "--positions", "600", "--window", "16", "--batch", "64", "--steps", "4"
  return lens.main([str(folder), "--fit", str(text), "--out", str(out), *sizes, *options])


@pytest.fixture(scope="module")
def fitted(folder, text, tmp_path_factory):
  """A lens, alone in its folder, and what `--json` prints of its fit."""
  out = tmp_path_factory.mktemp("lens") / "lens.safetensors"
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    assert fit(folder, text, out, "--json") == 0
  return out, json.loads(printed.getvalue())


@pytest.mark.programs(80)  # of the fit
def test_a_fitted_lens_is_nearer_at_every_block_and_its_page_is_whole(
  folder, fitted, tmp_path, capsys
):
  out, found = fitted
  assert all(tuned < logit for tuned, logit in zip(found["tuned"], found["logit"]))
  assert [path.name for path in out.parent.iterdir()] == [out.name]
  page = tmp_path / "page.html"
  read = lambda *options: lens.main([str(folder), "--prompt", PROMPT, "--lens", str(out), *options])
  assert read("--json", "--page", str(page)) == 0
  rows = json.loads(capsys.readouterr().out)
  assert [row["blocks"] for row in rows] == list(range(len(found["tuned"]) + 1))
  assert abs(rows[-1]["kl"]) < 1e-6
  assert all(cell["rank"] == 1 for cell in rows[-1]["cells"])
  assert rows[0]["bits_per_byte"] > 0
  # <s> is no text, so that w1 is predicted too.
  nats = sum(cell["nats"] for cell in rows[0]["cells"][:-1])
  assert rows[0]["bits_per_byte"] == pytest.approx(nats / np.log(2) / len(PROMPT))
  assert rows[0]["cells"][-1]["nats"] is None
  html = page.read_text("utf-8")
  assert html.count('class="cell"') == len(rows) * len(rows[0]["cells"])
  # Nothing is loaded from outside, and every cell can have the focus of the keyboard.
  assert not re.search(r'(?:src|href)="(?!#)', html)
  assert html.count('class="cell" tabindex="0"') == html.count('class="cell"')
  assert read("--blocks", "1") == 0
  printed = capsys.readouterr().out
  assert {*re.findall(r"^ +(\d) ", printed, re.MULTILINE)} == {str(len(rows) - 1), "1"}


def test_what_is_not_a_number_is_null_and_shown(tmp_path):
  nan = np.full((2, 1, 3), np.nan, np.float32)
  tokens = np.zeros((2, 1, 3, 1), np.int32)
  found = Readings(tokens, nan[..., None], nan, nan, nan, nan, tokens[..., 0] + 1)
  reading = Reading.of(found, [0, 4], [1, 2, 3], Wide())
  rows = reading.rows()
  json.dumps(rows, allow_nan=False)
  assert {row["kl"] for row in rows} == {None}
  write_reading_page(reading, tmp_path / "page.html", "nothing")
  assert "nan" not in (tmp_path / "page.html").read_text("utf-8").partition("<svg")[0]
  out = io.StringIO()
  lens.show_reading(reading, Console(file=out, width=60))
  assert {cell_len(line) for line in out.getvalue().splitlines()[:3]} == {6 + 3 * 12}


class Wide:
  """A tokenizer whose tokens have characters of two columns, and one that moves the cursor."""

  vocab = 4

  def decode(self, tokens):
    return "".join(["東京", "日本の首都", "\x1b", "a"][token] for token in tokens)


@pytest.mark.programs(80)  # of which half are the marks of two models' parameters
def test_an_interrupted_fit_goes_on_where_it_was(
  folder, text, fitted, tmp_path, monkeypatch, capsys
):
  resumed = tmp_path / "resumed.safetensors"
  monkeypatch.setattr(fitting, "EVERY", 0.0)
  progress = fitting.ProgressBars.__enter__

  def stop_at_half(self):
    bars = progress(self)

    def bar(title):
      update = bars(title)

      def stop(part):
        update(part)
        # After the third step, of which the second one's state is kept.
        if title == "divergence" and part == 0.75:
          raise KeyboardInterrupt

      return stop

    return bar

  with monkeypatch.context() as patch:
    patch.setattr(fitting.ProgressBars, "__enter__", stop_at_half)
    assert fit(folder, text, resumed) == 130
  assert not resumed.exists()
  assert fit(folder, text, resumed) == 0
  assert "going on with step 2 of 4" in capsys.readouterr().err
  assert fitted[0].read_bytes() == resumed.read_bytes()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (("--prompt", " ".join(["w1"] * 700)), r"`--prompt` must have 1 to \d+ tokens"),
    (("--prompt", PROMPT, "--lens", "{text}"), "`path` must be a file of `save_lens`"),
    (("--prompt", PROMPT, "--k", "0"), "`k` must be in"),
    (("--prompt", PROMPT, "--blocks", "9"), r"`blocks` must be in \[0, \d\]"),
    (("--prompt", PROMPT, "--steps", "9"), "`--steps` needs `--fit`"),
    (("--fit", "{text}", "--out", "{new}", "--blocks", "0"), "`--blocks` needs `--prompt`"),
    (("--fit", "{text}", "--out", "{text}"), "`--out` must be new"),
    (("--fit", "{text}", "--out", "/none/lens"), "in a folder that exists"),
    (("--fit", "{short}", "--out", "{new}"), "at least two windows"),
    (("--fit", "{text}", "--out", "{new}", "--steps", "-1"), "`--steps` must be at least 0"),
  ],
)
def test_bad_input_is_named(folder, text, tmp_path, capsys, options, message):
  short = tmp_path / "short.txt"
  short.write_text("w1 w2")
  places = {"text": text, "short": short, "new": tmp_path / "lens"}
  try:
    code = lens.main([str(folder), *(option.format(**places) for option in options)])
  except SystemExit as stopped:  # of argparse
    code = stopped.code
  assert code == 2
  assert re.search(message, capsys.readouterr().err)
  assert not (tmp_path / "lens").exists()
