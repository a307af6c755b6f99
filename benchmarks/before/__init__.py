"""Compare the working tree with an old commit: equal trajectories, and the time of a step."""
