"""Benchmarks of speed, memory and exactness, run by `python -m experiments.bench`.

Compared programs are called in turn in one process, and figures are medians. Tests run each
benchmark at tiny sizes and assert no time.
"""
