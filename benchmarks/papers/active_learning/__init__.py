"""Active learning: the regressions of Zhang et al. 2018, Table 3, and images."""
