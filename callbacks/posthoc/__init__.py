"""What the posteriors that are fitted around trained weights have in common."""
