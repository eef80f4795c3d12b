"""Memories of hashed n-grams beside a small decoder."""
