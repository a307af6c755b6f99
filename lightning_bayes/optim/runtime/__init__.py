"""What every noisy optimizer runs on: sampled passes, noise, blocks of elementwise arithmetic."""
