"""How do the JSON rows that runs wrote become tables, plots and one HTML page?"""

from vqjax.report.columns import Column, default_columns
from vqjax.report.page import write_page
from vqjax.report.plots import loss_curves, save_png, size_against_perplexity
from vqjax.report.rows import Run, read_run, read_runs
from vqjax.report.tables import console_table, html_table, markdown_table

__all__ = [
  "Column",
  "Run",
  "console_table",
  "default_columns",
  "html_table",
  "loss_curves",
  "markdown_table",
  "read_run",
  "read_runs",
  "save_png",
  "size_against_perplexity",
  "write_page",
]
