"""Speed and memory of a full training step, each method beside torch's Adam in one process."""
