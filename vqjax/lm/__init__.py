"""Decoders that people have: their files, text from them, faster decoding, and smaller tables."""
