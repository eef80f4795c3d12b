"""Compressed vocabulary layers of language models in JAX and Flax.

Names are imported when they are first used, so that `vqjax.ops` loads JAX without Flax. The stub
`__init__.pyi` declares them.
"""

import pkgutil

import lazy_loader

_attribute, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
# `from vqjax import *` takes no packages: some need extras, and "nnx" or "torch" are others' names.
__all__: list[str] = sorted({*_names} - {module.name for module in pkgutil.iter_modules(__path__)})


def __getattr__(name: str):
  # To read the metadata takes most of the time of this import, in which Ctrl-C is Python's own.
  if name == "__version__":
    import importlib.metadata

    return importlib.metadata.version("vqjax")
  return _attribute(name)
