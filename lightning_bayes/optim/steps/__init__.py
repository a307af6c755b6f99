"""What moves the posterior mean: the papers' natural step, a trust region round it, or the user's optimizer."""
