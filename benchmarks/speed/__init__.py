"""Time and memory of a full training step, compared with torch's Adam in the same process."""
