"""The runtime of every noisy optimizer: sampled passes, noise, blocks of elementwise arithmetic."""
