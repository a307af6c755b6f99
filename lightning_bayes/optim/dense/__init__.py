"""Full and block-tridiagonal posteriors, for small models."""
