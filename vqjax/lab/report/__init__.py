"""Tables, plots and an HTML page from the JSON that runs write."""

from vqjax.lab.report.plots import loss_curves, save_png, size_against_perplexity
from vqjax.lab.report.run_page import write_run_page
from vqjax.lab.report.run_tables import console_table, markdown_table
from vqjax.lab.report.runs import (
  Column,
  Run,
  common_split,
  default_columns,
  labels,
  read_run,
  read_runs,
)
from vqjax.lm.pages import INK, SERIES

__all__ = [
  "INK",
  "SERIES",
  "Column",
  "Run",
  "common_split",
  "console_table",
  "default_columns",
  "labels",
  "loss_curves",
  "markdown_table",
  "read_run",
  "read_runs",
  "save_png",
  "size_against_perplexity",
  "write_run_page",
]
