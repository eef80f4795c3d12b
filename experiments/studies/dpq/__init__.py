"""Differentiable product quantisation of embeddings (Chen et al., 2020)."""
