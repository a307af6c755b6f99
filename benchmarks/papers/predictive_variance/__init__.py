"""Predictive variances against Hamiltonian Monte Carlo, Table 4 of Zhang et al. 2018: ``__main__`` runs it."""
