"""Do the grouped head's tables say what their runs say, and what the paper prints?"""

import contextlib
import http.server
import json
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.grouped_lm import dense, language_model
from experiments.studies.grouped import asked as grouped_asked
from experiments.studies.grouped import findings as grouped_findings
from experiments.studies.grouped import notes as grouped_notes
from experiments.studies.grouped import page as grouped_page
from experiments.studies.grouped import paper as grouped_paper
from experiments.studies.grouped import plots as grouped_plots
from experiments.studies.grouped import report as grouped_report
from experiments.studies.grouped import run as grouped_tables
from experiments.studies.grouped import settings as grouped_settings
from experiments.studies.grouped.curves import curves
from experiments.studies.grouped.paper import TABLE_1
from experiments.studies.grouped.spread import SpreadTokenizer
from vqjax.lab.config import with_vocab
from vqjax.lab.data import WordTokenizer

ROWS = "tiny-16/gpt-2", "tiny-16/converted-frequency", "top/tiny-16", "pictures/grouped"


def cells(table, label):
  """The cells of a row of the Markdown table by the titles of their columns."""
  header, _, *body = table.markdown().splitlines()
  split = lambda line: [cell.strip() for cell in line.strip("|").split(" | ")]
  values = next(line for line in map(split, body) if line[0] == label)
  return dict(zip(split(header), values, strict=True))


def kept(nats, **beside):
  result = {
    **{"status": "finished", "commit": "c0ffee", "device": "cpu", "date": "2026-01-02T03"},
    **{"test": {"nats_per_token": nats, "perplexity": float(np.exp(nats))}},
    **{"valid": {"nats_per_token": nats}, "head": {"params": 7}, "model": {"params": 8_085_000}},
  }
  return {"result": result, **beside}


@pytest.fixture
def results():
  curve = {"train": [[5, 6.0], [10, 5.0]], "valid": [[10, 5.5]]}
  of_group = {"accuracy": [[10, 0.2]], "group_accuracy": [[10, 0.5]]}
  failed = {"status": "failed", "error": "the loss is nan", "commit": "c0ffee", "device": "cpu"}
  grades = {"grammar": 3.5, "creativity": 3.0, "consistency": 4.0, "plot": 2.5, "age": 5.0}
  top = {
    **{"ratio": 0.125, "groups": 512, "visited": 9.5, "visited_most": 30, "mass": 0.8, "k": 50},
    **{"vocab": 262_144, "positions": 30, "seconds": 1e-3, "seconds_all": 8e-3, "same": True},
  }
  return {
    "lm-128/gpt-2": kept(4.0, curves=curve),
    "lm-128/grouped": kept(4.125, curves=curve),
    "lm-128/gpt-neo": {"result": failed},
    "grades/lm-128-grouped": kept(
      1.0, grades=grades, graded=28, failed=2, settings={"model": "teacher", "stories": 30}
    ),
    "sizes/groups-6": kept(5.0),
    "pictures/dense": kept(6.0, curves=curve),
    "pictures/grouped": kept(5.0, curves=curve | of_group),
    "top/wide": kept(1.0, top=top),
  }


@pytest.fixture
def cost():
  row = lambda peak, plain: {
    "peak_bytes": peak,
    "without_remat": {"peak_bytes": plain},
    "tokens_per_s": 1e9 / peak,
    "macs": {"weights": 4_000_000_000, "attention": 500_000_000},
  }
  own = {"seconds": 0.01, "faster_than_materialised": 41.0, "faster_than_tiled": 16.0}
  return {
    "loss": {
      "rows": {"grouped": own | {"temp_smaller": 50.0}, "unshared": own | {"seconds": 0.02}}
    },
    "steps": {"128": {"gpt-2": row(6e9, 14e9), "grouped": row(1e9, 7e9)}},
    "sizes": [{"size": 8_372, "groups": 6, "peak_bytes": 10**9}],
    "provenance": {"loss": {"commit": "beef", "device": "cpu", "date": "2026", "quick": False}},
  }


def test_a_language_model_has_its_perplexity_its_distance_and_both_grades(results):
  table = grouped_report.language(results, "cpu")
  row = cells(table, "lm-128: grouped")
  assert (row["perplexity"], row["nats"], row["over GPT-2"]) == ("61.87", "4.125", "+0.125")
  assert (row["grammar"], row["age"]) == ("3.50 / 3.53", "5.00 / 4.55")
  assert cells(table, "lm-128: GPT-2")["plot"] == "– / 2.95"  # nobody judged it
  assert cells(table, "lm-128: GPT-Neo")["perplexity"] == "failed"
  assert cells(table, "lm-128: grouped, by clusters")["perplexity"] == "–"
  assert cells(table, "paper, grouped, 512")["plot"] == "– / 5.475"  # as it is printed


def test_pictures_have_their_rates_in_per_cent_and_a_failed_run_says_so(results):
  results["pictures/grouped"]["result"]["test"] |= {"accuracy": 0.25, "group_accuracy": 0.5}
  results["pictures/dense"]["result"] = results["lm-128/gpt-neo"]["result"]
  table = grouped_report.pictures(results, "cpu")
  assert "480 classes" in table.title
  row = cells(table, "CNN, grouped")
  assert (row["accuracy"], row["of the group"], row["paper"]) == ("25.0", "50.0", "10,340,999")
  assert cells(table, "CNN, dense")["accuracy"] == "failed"


def test_memory_and_speed_stand_beside_the_papers(cost):
  row = cells(grouped_report.memory(cost), "128 (8.1 M): grouped")
  assert (row["compiled"], row["recomputing"], row["of GPT-2"]) == ("7.00", "1.00", "0.17")
  assert row["paper"] == "3.8"
  assert cells(grouped_report.memory(cost), "2048 (659 M): GPT-2")["paper"] == "oom"
  row = cells(grouped_report.speed(cost), "128 (8.1 M): grouped")
  assert (row["of GPT-2"], row["of its GPT-2"]) == ("6.00×", "2.89×")
  assert (row["GMAC"], row["with attention"], row['"GFLOPs"']) == ("4.00", "4.50", "0.83")


def test_a_step_that_the_compiler_refuses_has_failed_and_one_that_nobody_compiled_a_dash(cost):
  rows = cost["steps"]["128"]
  del rows["grouped"]["without_remat"]
  rows["grouped"]["error"] = "out of memory"
  rows["gpt-neo"] = {"macs": rows["grouped"]["macs"], "error": "out of memory"}
  table = grouped_report.memory(cost)
  memory = lambda name: [cells(table, name)[of] for of in ("compiled", "recomputing")]
  assert memory("128 (8.1 M): grouped") == ["failed", "1.00"]
  assert memory("128 (8.1 M): GPT-Neo") == ["–", "failed"]
  assert memory("128 (8.1 M): codebook") == ["–", "–"]


def test_figures_of_tiny_sizes_are_none_of_the_papers(cost, tmp_path):
  assert grouped_report.read_cost(tmp_path) is None
  cost["provenance"]["sizes"] = cost["provenance"]["loss"] | {"quick": True}
  path = tmp_path / "results" / "grouped" / "cost.json"
  path.parent.mkdir(parents=True)
  path.write_text(json.dumps(cost | {"least": {"sqrt": 22}}))
  found = grouped_report.read_cost(tmp_path)
  assert found.keys() == {"loss", "steps", "provenance"}
  assert found["provenance"].keys() == {"loss"}


def test_what_was_asked_is_beside_what_was_measured(results, cost):
  section = grouped_asked.section(results, cost)
  for said in ("41.0×", "16.0×", "1/50", "2.00×", "1/6.0", "1/2.0", "0.125"):
    assert f"| {said}" in section or said in section
  assert grouped_asked.section({}, None).count("| – |") == 9


def test_the_page_has_every_plot_and_names_what_failed(results, cost, tmp_path):
  path = tmp_path / "results" / "grouped" / "cost.json"
  path.parent.mkdir(parents=True)
  cost["steps"]["128"]["gpt-neo"] = {"macs": {"weights": 1, "attention": 1}, "error": "too large"}
  path.write_text(json.dumps(cost))
  page, *plots = grouped_page.write(results, tmp_path)
  assert {plot.name for plot in plots} == set(grouped_plots.CAPTIONS)
  text = page.read_text()
  assert "lm-128/gpt-neo failed: the loss is nan" in text
  assert all(f"images/{name}" in text for name in grouped_plots.CAPTIONS)
  assert "- the bench's width 128, gpt-neo, failed: too large" in text
  assert "- the bench's loss: cpu, commit beef" in text
  assert "- grades: by teacher, of 30 stories a model" in text
  assert "- grades/lm-128-grouped: of 2 stories no grade could be read" in text


def test_what_came_out_compares_rows_of_as_many_steps(results, cost):
  least = {"size": 84, "bytes": 1, "near": [56, 161]}
  section = grouped_findings.section(results, cost | {"least": {"sqrt": 224, "step": least}})
  assert "lm-128: grouped has +0.125 nats a token over GPT-2." in section
  assert "least with 84 tokens a group, and within 2 % of that from 56 to 161" in section
  assert "GPT-Neo has" not in section  # it failed
  assert "9.5 of 512 groups" in section
  assert "numbers of groups" not in section  # there is one
  assert "end with equal log-probabilities" in section


def test_a_page_without_any_result_can_be_written(tmp_path):
  (page,) = grouped_page.write({}, tmp_path)
  assert "## Table 1" in page.read_text()


def test_the_notes_compute_what_the_paper_gets_wrong():
  text = grouped_notes.notes()
  for number in (
    "506.8 M",
    "8.1 M at 128",
    "19.3 M at 256",
    "3.28 GB",
    "3.4, 3.5, 1.8 of Table 2",
    "3.7, 3.1, 1.7\n",
    "184,470",
    "150 slots",
    "4.10 G",
    "4.64 G",
    "0.83 G",
  ):
    assert number in text


def test_the_counted_parameters_are_those_of_the_model():
  run = with_vocab(language_model("x", dense, 128), grouped_notes.V)
  tokens = jnp.zeros((1, 4), jnp.int32)
  shapes = jax.eval_shape(lambda key: run.model.init(key, tokens), jax.random.key(0))
  counted = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  assert counted == grouped_notes.decoder_params(128)


def test_group_sizes_are_the_factors_that_the_paper_took():
  every = grouped_paper.divisors(grouped_paper.FACTORED)
  assert len(every) == 64
  assert len(grouped_paper.ABLATED) == 56
  assert len(grouped_settings.FEW_SIZES) == 12
  assert set(grouped_settings.FEW_SIZES) <= set(every)


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_every_scale_has_the_papers_rows_and_names_no_work_twice(scale):
  names = [work.name for work in grouped_tables.works(scale)]
  assert len(set(names)) == len(names)
  assert {"pictures/dense", "pictures/grouped", "wide/grouped"} <= set(names)
  if scale == "paper":
    assert {f"lm-{d}/{row}" for row, widths in TABLE_1.items() for d in widths} <= set(names)


def test_losses_are_averaged_between_the_points_that_are_kept():
  rows = [{"step": step, "loss": float(step % 2)} for step in range(1, 121)]
  rows.append({"step": 120, "valid": {"nats_per_token": 3.0, "accuracy": 0.25}})
  found = curves(rows)
  assert len(found["train"]) == 60
  assert {loss for _, loss in found["train"]} == {0.5}
  assert found["valid"] == [[120, 3.0]]
  assert found["accuracy"] == [[120, 0.25]]


def test_spread_tokens_are_the_same_text():
  inner = WordTokenizer(split=False)
  fit = lambda tokenizer: tokenizer.fit(lambda: ["a b c d", "b a"])
  small, large = fit(inner), fit(SpreadTokenizer(inner, 50))
  assert large.vocab == 50
  assert large.stride == 50 // small.vocab
  tokens = large.encode("d c a")
  np.testing.assert_array_equal(tokens, small.encode("d c a") * large.stride)
  assert large.decode(tokens) == small.decode(small.encode("d c a"))
  again = SpreadTokenizer(inner, 50).load(large.state())
  np.testing.assert_array_equal(again.encode("d c a"), tokens)
  with pytest.raises(ValueError, match="6 tokens do not spread over 5; give at least"):
    fit(SpreadTokenizer(inner, 5))


def test_a_judge_needs_an_address_and_a_model(capsys):
  for arguments in (["--judge-url", "http://127.0.0.1:1/v1"], ["--judge-model", "m"]):
    with pytest.raises(SystemExit, match="2"):
      grouped_tables.main([*arguments, "--list"])
    assert "give both" in capsys.readouterr().err


@contextlib.contextmanager
def endpoint():
  """The address of a judge to whom everything is a story of a child of seven."""
  line = "Grammar: 4/10, Creativity: 3/10, Consistency: 2/10, Plot: 1/10, Age group: C (6-7)"
  answer = {"choices": [{"message": {"role": "assistant", "content": line}}]}

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      self.rfile.read(int(self.headers["Content-Length"]))
      content = json.dumps(answer).encode()
      self.send_response(200)
      self.send_header("Content-Length", str(len(content)))
      self.end_headers()
      self.wfile.write(content)

    def log_message(self, *arguments):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
  thread.start()
  yield f"http://127.0.0.1:{server.server_port}/v1"
  server.shutdown()
  server.server_close()
  thread.join()


def test_the_command_runs_goes_on_grades_and_renders(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("NO_PROXY", "127.0.0.1")
  assert grouped_tables.main(["--scale", "smoke", "--only", ",".join(ROWS)]) == 0
  folder = tmp_path / "runs" / "grouped" / "smoke" / "kept"
  names = {path.stem for path in folder.glob("*.json")}
  assert names == {name.replace("/", "-") for name in (*ROWS, "tiny-16/grouped")}
  before = {path: os.stat(path).st_mtime_ns for path in folder.glob("*.json")}
  with endpoint() as url:
    judged = ["--judge-url", url, "--judge-model", "m"]
    graded = ["--only", "grades/tiny-16-gpt-2"]
    assert grouped_tables.main(["--scale", "smoke", *judged, *graded]) == 0
  assert {path: os.stat(path).st_mtime_ns for path in before} == before  # nothing ran again
  capsys.readouterr()
  assert grouped_tables.main(["--scale", "smoke", "--render"]) == 0  # the grades stay
  assert "Table 1" in capsys.readouterr().out
  results = grouped_tables.STUDY.current("smoke")
  assert results["grades/tiny-16-gpt-2"]["grades"]["age"] == 6.5
  row = cells(grouped_report.language(results, "smoke"), "tiny-16: GPT-2")
  assert row["consistency"] == "2.00 / –"
  assert row["perplexity"] != "–"
  assert results["top/tiny-16"]["top"]["same"]
  # The same body with another head: not as good, and not lost.
  begun = results["tiny-16/converted-frequency"]["result"]["test"]["nats_per_token"]
  assert results["tiny-16/gpt-2"]["result"]["test"]["nats_per_token"] < begun < 7
