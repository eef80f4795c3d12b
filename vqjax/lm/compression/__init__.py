"""Vocabulary tables of pretrained models: measured, compressed, exported and trimmed."""
