"""Run folders for the tests of commands."""

from tests.lab.report.conftest import demo, finished, write_run

__all__ = ["demo", "finished", "write_run"]
