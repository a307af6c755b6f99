"""Predictive variances compared with Hamiltonian Monte Carlo, Table 4 of Zhang et al. 2018; run ``__main__``."""
