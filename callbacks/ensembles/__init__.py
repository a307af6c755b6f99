"""Members of ensembles and modes of one fit: where they start, how they are trained and kept."""
