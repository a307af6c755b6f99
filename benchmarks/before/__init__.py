"""The working tree beside an old commit: equal trajectories, and equal time for a step."""
