"""One-dimensional regression with a gap in the data: the uncertainty of each posterior in the gap."""
