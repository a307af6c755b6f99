"""Benchmarks: each prints what it measured, and `results/` keeps small files of what was printed."""
