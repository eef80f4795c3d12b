"""Compressed vocabulary layers of language models in JAX and Flax.

Names are imported when they are first used, so that `vqjax.ops` loads JAX without Flax. The stub
`__init__.pyi` declares them.
"""

import lazy_loader

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str):
  # To read the metadata takes most of the time of this import, in which Ctrl-C is Python's own.
  if name == "__version__":
    import importlib.metadata

    return importlib.metadata.version("vqjax")
  return _attribute(name)
