"""Laplace of this package beside laplace-torch (Daxberger et al. 2021): the same numbers, time and memory."""
