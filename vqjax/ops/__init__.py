"""Array computations of compressed vocabulary layers; they import only JAX."""
