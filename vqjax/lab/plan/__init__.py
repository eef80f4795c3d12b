"""Training steps compiled ahead of time for accelerators, without having them."""
