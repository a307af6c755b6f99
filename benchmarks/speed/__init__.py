"""Speed, shown as ratios of interleaved runs in one process."""
