"""Scores of predictions on the target's test images, and of telling them from other sets by predictive entropy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.finetune.data import Images
from benchmarks.finetune.methods import Predict
from lightning_bayes.metrics import expected_calibration_error, nll_per_example, ood_auroc
from lightning_bayes.predictive import entropy


def scores(predict: Predict, test: Images, others: Mapping[str, Tensor]) -> dict[str, float]:
    """Measure.

    Args:
        predict: From images to probabilities.
        test: Images of the target.
        others: Images out of distribution, by name of the score.

    Returns:
        ``accuracy``, ``nll`` in nats, ``ece`` of 15 bins, and an AUROC per set out of distribution.
    """
    probs = _probs(predict, test.x)
    found = {
        "accuracy": (probs.argmax(-1) == test.y).double().mean(),
        "nll": nll_per_example(probs, test.y).mean(),
        "ece": expected_calibration_error(probs, test.y),
    }
    familiar = entropy(probs)
    for name, images in others.items():
        strange = entropy(_probs(predict, images))
        is_ood = torch.cat([torch.zeros_like(familiar), torch.ones_like(strange)])
        found[name] = ood_auroc(torch.cat([familiar, strange]), is_ood)
    return {name: float(value) for name, value in found.items()}


def _probs(predict: Predict, images: Tensor) -> Tensor:
    probs = predict(images).double()
    return probs / probs.sum(-1, keepdim=True)
