"""Calls in a process of their own that ends with its caller."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def isolated(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
  """Call a function in a new process with its own peak memory and crashes.

  The process ends when its caller is killed or interrupted; otherwise it would disturb the next
  measurement.

  Raises:
    BrokenProcessPool: the process died. Errors of the function are raised as they are.
  """
  spawn = multiprocessing.get_context("spawn")
  with ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_with_caller) as pool:
    try:
      return pool.submit(function, *args, **kwargs).result()
    except KeyboardInterrupt:
      # The pool would wait for the process to end. These commands have no other children.
      for child in multiprocessing.active_children():
        child.terminate()
      raise


def _end_with_caller() -> None:
  def wait():
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()
