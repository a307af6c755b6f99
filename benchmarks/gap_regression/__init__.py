"""One-dimensional regression with a gap in the data: what each posterior says where there is none."""
