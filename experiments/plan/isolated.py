"""How does a call run in a process of its own, which ends when its caller does?"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def isolated(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
  """function(...) in a new process: its peak of memory and its crash are its own.

  A caller that is killed or interrupted takes the process with it: one that went on would spoil
  what is measured next.

  Raises:
    BrokenProcessPool: the process died; whatever else the function raises.
  """
  spawn = multiprocessing.get_context("spawn")
  with ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_with_caller) as pool:
    try:
      return pool.submit(function, *args, **kwargs).result()
    except KeyboardInterrupt:
      # The pool would wait for it to end; it is the only child of these commands.
      for child in multiprocessing.active_children():
        child.terminate()
      raise


def _end_with_caller() -> None:
  def wait():
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()
