"""Experiments of the methods' papers, run again with this package's updates."""
