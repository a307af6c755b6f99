"""Laplace of this package compared with laplace-torch (Daxberger et al. 2021): agreement, time and memory."""
