"""Benchmarks: each prints its measurements; `results/` has small JSON files of them."""
