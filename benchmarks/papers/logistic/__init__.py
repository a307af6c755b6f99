"""Bayesian logistic regression: Khan et al. 2018, Fig. 2, and Khan et al. 2017 (Vprop), Figs. 2-3.

python -m benchmarks.papers.logistic --root FOLDER --out FOLDER [--sets toy usps breast-cancer australian a1a mlp]
    [--epochs N] [--passes 400] [--runs 10] [--json FILE]
"""
