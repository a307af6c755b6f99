"""Exploration with weight noise: DDPG with Vadam and VadaGrad (Khan et al. 2018)."""
