"""Compressed vocabulary layers of language models in JAX and Flax.

Names are imported when they are first used, so that `vqjax.ops` loads JAX without Flax. The stub
`__init__.pyi` declares them.
"""

import importlib.metadata

import lazy_loader

__version__ = importlib.metadata.version("vqjax")
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
