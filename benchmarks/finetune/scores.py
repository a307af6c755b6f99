"""Scores of predictions on the target's test images, and OOD detection by predictive entropy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.finetune.data import Images
from benchmarks.finetune.methods import Predict
from lightning_bayes.metrics import expected_calibration_error, nll_per_example, ood_auroc
from lightning_bayes.predictive import entropy


def scores(predict: Predict, test: Images, others: Mapping[str, Tensor]) -> dict[str, float]:
    """Score a prediction function."""
    probs = _probs(predict, test.x)
    values = {
        "accuracy": (probs.argmax(-1) == test.y).double().mean(),
        "nll": nll_per_example(probs, test.y).mean(),
        "ece": expected_calibration_error(probs, test.y),
    }
    test_entropy = entropy(probs)
    for name, images in others.items():
        ood_entropy = entropy(_probs(predict, images))
        is_ood = torch.cat([torch.zeros_like(test_entropy), torch.ones_like(ood_entropy)])
        values[name] = ood_auroc(torch.cat([test_entropy, ood_entropy]), is_ood)
    return {name: float(value) for name, value in values.items()}


def _probs(predict: Predict, images: Tensor) -> Tensor:
    probs = predict(images).double()
    return probs / probs.sum(-1, keepdim=True)
