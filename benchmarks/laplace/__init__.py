"""The prior of a Laplace approximation; `tests/posthoc/test_laplace.py` compares the package with laplace-torch."""
