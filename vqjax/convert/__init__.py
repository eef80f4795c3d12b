"""Conversions of arrays [V, D] to variables of compressed layers.

A `Mapping` assigns tokens to codes, an `Ordering` sorts them for a grouped head, and a target
(`ToCodebook`, `ToGrouped`, ...) makes a head's variables, all from `TokenStats`. The functions
`to_levels`, `to_int8`, `to_clusters` and `reconstruct` make an embedding's variables from a trained
table.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
