"""How do the JSON rows that runs wrote become tables, plots and one HTML page?"""

from vqjax.lab.report.columns import Column, default_columns
from vqjax.lab.report.page import write_page
from vqjax.lab.report.plots import loss_curves, save_png, size_against_perplexity
from vqjax.lab.report.rows import Run, read_run, read_runs
from vqjax.lab.report.tables import console_table, html_table, markdown_table

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
