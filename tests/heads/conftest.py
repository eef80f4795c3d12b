"""Runs each test of a contract once for every case of its class."""

from tests.contract import for_each_case


def pytest_generate_tests(metafunc):
  for_each_case(metafunc)
