"""Which array computations does a compressed vocabulary layer rest on?  They import jax alone."""
