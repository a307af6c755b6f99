"""Experiments of the methods' papers, repeated with this package."""
