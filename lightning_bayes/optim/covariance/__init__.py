"""Covariances of the posterior families: state → sample, precision, refresh."""
