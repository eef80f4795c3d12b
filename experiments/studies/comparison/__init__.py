"""Comparison of vocabulary heads, each tuned, over several seeds."""
