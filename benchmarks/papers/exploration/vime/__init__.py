"""VIME, Houthooft et al. 2016, with a matrix-variate or mean-field dynamics model (Zhang et al. 2018, Fig. 3 and C.4)."""
