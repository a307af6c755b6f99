"""Matrix-variate posteriors: K-FAC, Noisy K-FAC and what they share."""
