"""Plots are deterministic, without overlapping labels and missing numbers."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from vqjax.lab import report
from vqjax.lab.report.plots import smooth, spread_labels
from vqjax.lm.pages import svg

PLOTS = (report.loss_curves, report.size_against_perplexity)


@pytest.mark.parametrize("plot", PLOTS)
def test_the_same_runs_give_the_same_svg_whose_ids_and_colours_are_those_of_its_page(demo, plot):
  text, again = (svg(plot(report.read_runs(demo)), "loss", 'a "b"') for _ in range(2))
  assert text == again
  assert text.startswith("<svg ")
  assert "<metadata>" not in text
  assert "<dc:date>" not in text
  assert "var(--ink," in text
  assert "var(--series-0," in text
  assert 'aria-label="a &quot;b&quot;"' in text
  for reference in ('id="', 'href="#', "url(#"):
    assert text.count(reference) == text.count(f"{reference}loss-") > 0


def with_losses(write_run, *losses):
  """Returns a run with (step, loss) as the rows of its metrics."""
  run = report.read_run(write_run("one", None, steps=0))
  return dataclasses.replace(run, metrics=tuple({"step": s, "loss": x} for s, x in losses))


def test_runs_without_finite_numbers_draw_nothing(write_run):
  assert report.loss_curves([with_losses(write_run, (1, math.nan))]) is None
  for plot in PLOTS:
    assert plot(report.read_runs(write_run(f"started {plot.__name__}", None, steps=0))) is None


def test_a_loss_that_is_not_finite_is_left_out(write_run):
  losses = [(step, math.nan if step in (2, 99) else 5.0) for step in range(1, 100)]
  axes = report.loss_curves([with_losses(write_run, *losses)]).axes[0]
  assert list(axes.lines[0].get_ydata()) == [5.0] * 97
  assert all(math.isfinite(limit) for limit in axes.get_ylim())


def test_steps_that_a_resumed_run_repeats_count_once_and_as_written_last(write_run):
  run = with_losses(write_run, (1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0))
  line = report.loss_curves([run]).axes[0].lines[0]
  assert list(zip(*line.get_data(), strict=True)) == [(1, 9.0), (2, 6.0), (3, 7.0)]


def test_a_tied_head_of_0_bytes_stands_left_of_the_others(demo, write_run, finished):
  write_run("e_tied", finished("tied", head={"class": "Dense", "state_bytes": 0, "tied": True}))
  figure = report.size_against_perplexity(report.read_runs(demo))
  assert figure.axes[0].get_xticklabels()[0].get_text() == "0 (tied)"
  drawn = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "o"]
  assert 0 < drawn[2] < min(drawn[:2])


def test_labels_of_crowded_points_do_not_overlap_and_stay_in_the_axes(
  write_run, finished, tmp_path
):
  for at in range(9):
    head = {"class": "H", "state_bytes": 100_000 + 9_000 * (at % 3)}
    write_run(f"run_{at}", finished(f"run_number_{at}", perplexity=150 + at // 3, head=head))
  figure = report.size_against_perplexity(report.read_runs(tmp_path))
  FigureCanvasAgg(figure).draw()
  boxes = [text.get_window_extent() for text in figure.axes[0].texts]
  assert len(boxes) == 9
  for one, other in itertools.combinations(boxes, 2):
    assert not one.overlaps(other)
  for box in boxes:
    assert figure.axes[0].bbox.count_contains(box.get_points()) == 2


def test_labels_of_curves_keep_their_distance_and_order():
  wanted = [0.5, 0.5, 0.52, 0.98, 0.97, 0.0]
  placed = spread_labels(wanted, 0.1)
  assert min(np.diff(np.sort(placed))) >= 0.1 - 1e-12  # twelve digits of double precision
  assert sorted(range(6), key=lambda at: placed[at]) == [5, 0, 1, 2, 4, 3]
  assert min(placed) >= 0
  assert max(placed) <= 1
  np.testing.assert_allclose(spread_labels([0.1, 0.9, 0.5], 0.1), [0.1, 0.9, 0.5])


def test_smoothing_keeps_a_line_and_both_ends():
  line = np.linspace(9.0, 5.0, 211)
  np.testing.assert_allclose(smooth(line), line, rtol=1e-12)  # sums of 211 doubles
  noisy = line + np.random.default_rng(0).normal(size=211)
  assert np.std(np.diff(smooth(noisy))) < np.std(np.diff(noisy)) / 2
  np.testing.assert_allclose(smooth(noisy)[[0, -1]], noisy[[0, -1]])


@pytest.mark.parametrize("plot", PLOTS)
def test_a_name_may_look_like_a_formula(write_run, finished, tmp_path, plot):
  folder = write_run("one", finished(r"$\bad{$ $x^2$"))
  figure = plot(report.read_runs(folder))
  report.save_png(figure, tmp_path / "plot.png")
  assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
  drawn = [text.get_text() for text in figure.axes[0].texts]
  assert r"$\bad{$ $x^2$" in drawn
  assert "<svg" in svg(figure, "a", "b")
