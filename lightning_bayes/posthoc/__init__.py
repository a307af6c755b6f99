"""Post-hoc posteriors around trained networks: Laplace approximations and SWAG."""

from lightning_bayes.posthoc.evidence import Evidence, log_evidence
from lightning_bayes.posthoc.laplace import Laplace, PriorPrecision, PriorStructure, StructureName, laplace
from lightning_bayes.posthoc.swag import SWAG

__all__ = [
    "SWAG",
    "Evidence",
    "Laplace",
    "PriorPrecision",
    "PriorStructure",
    "StructureName",
    "laplace",
    "log_evidence",
]
