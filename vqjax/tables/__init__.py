"""Lossy compression of trained tables [V, D] in the metric of their use, beyond 16-fold.

`Moments` says which errors cost how much, `coded_table` turns a table into a `CodedTable` of
integers, and `ideal_bits` counts the bits that an entropy coder needs for them. `pack` encodes a
table in bits that a `PackedHead` scores and a `PackedEmbedding` looks up where they lie.

Names are imported when they are first used, so that `torch_reader` does not load JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
