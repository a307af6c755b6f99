"""Post-hoc posteriors around trained networks: Laplace approximations and SWAG."""

from lightning_bayes.posthoc.evidence import Evidence, log_evidence
from lightning_bayes.posthoc.laplace import Laplace, PriorPrecision, PriorStructure, StructureName, laplace
from lightning_bayes.posthoc.swag import SWAG
from lightning_bayes.predictive import LikelihoodName

__all__ = [
    "SWAG",
    "Evidence",
    "Laplace",
    "LikelihoodName",
    "PriorPrecision",
    "PriorStructure",
    "StructureName",
    "laplace",
    "log_evidence",
]
