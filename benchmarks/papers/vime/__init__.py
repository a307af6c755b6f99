"""Variational information maximising exploration (VIME), Zhang et al. 2018, Figure 3."""
