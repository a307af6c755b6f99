"""What noise in the weights is worth for exploration: DDPG with Vadam and VadaGrad (Khan et al. 2018)."""
