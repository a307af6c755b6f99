"""Noisy K-FAC by this package's factors and by BackPACK's, on the same data, from the same starts."""
