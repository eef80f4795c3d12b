"""Array computations of compressed vocabulary layers; they import only JAX."""

from __future__ import annotations
