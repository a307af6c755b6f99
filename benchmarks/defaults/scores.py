"""Scores of a Monte-Carlo predictive: error, negative log-likelihood, calibration error; lower is better for all.

    classification   1 - accuracy                      -mean log mean_s p_s(y)       ECE, 15 bins
    regression       RMSE / standard deviation of y    -mean log mean_s N(y; …)      mean |coverage - level|, 19 levels

Regression is in units of the training targets' standard deviation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Normal

from lightning_bayes.metrics import expected_calibration_error, ood_auroc
from lightning_bayes.metrics.scoring import nll_per_example
from lightning_bayes.predictive import entropy, mutual_information

LEVELS = torch.arange(1, 20) / 20


def classification_scores(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Error, NLL and calibration of logits ``[S, N, classes]`` for targets ``[N]``."""
    probs = outputs.double().softmax(-1).mean(0)
    probs = probs / probs.sum(-1, keepdim=True)
    return {
        "error": float((probs.argmax(-1) != targets).double().mean()),
        "nll": float(nll_per_example(probs, targets).mean()),
        "calibration": float(expected_calibration_error(probs, targets)),
    }


def ood_scores(outputs: Tensor, ood: Tensor) -> dict[str, float]:
    """AUROC of out-of-distribution detection; OOD is the positive class."""
    probs = [logits.double().softmax(-1) for logits in (outputs, ood)]
    is_ood = torch.cat([torch.zeros(outputs.shape[1]), torch.ones(ood.shape[1])]).bool()
    scores = {
        "entropy_auroc": torch.cat([entropy(p.mean(0)) for p in probs]),
        "mi_auroc": torch.cat([mutual_information(p) for p in probs]),
    }
    return {name: float(ood_auroc(score, is_ood)) for name, score in scores.items()}


def regression_scores(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Error, NLL and calibration of means and log standard deviations ``[S, N, 2]`` for targets ``[N]``."""
    mean, log_std = outputs.double().unbind(-1)
    density, targets = Normal(mean, log_std.exp()), targets.double()
    log_mean = torch.logsumexp(density.log_prob(targets), 0) - math.log(len(outputs))
    rank = density.cdf(targets).mean(0)  # probability integral transform of the mixture
    covered = torch.stack([(rank <= level).double().mean() for level in LEVELS])
    return {
        "error": float((mean.mean(0) - targets).square().mean().sqrt()),
        "nll": float(-log_mean.mean()),
        "calibration": float((covered - LEVELS).abs().mean()),
    }
