"""Models that people have: read from safetensors, GGUF and llama2.c, and written for others.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
