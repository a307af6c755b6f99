"""Optimizers with full and block-tridiagonal posteriors for small models."""
