"""Predictive uncertainty, total and split: entropy = aleatoric + mutual information (epistemic), in nats.

H[p̄] = -Σ_c p̄_c log p̄_c        I = H[p̄] - (1/S) Σ_s H[p_s]        p̄ = (1/S) Σ_s p_s
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.errors import ShapeError


def entropy(probs: Tensor, dim: int = -1) -> Tensor:
    """Shannon entropy in nats.

    Args:
        probs: Probabilities that add up to one along `dim`.
        dim: The classes' dimension.

    Returns:
        `probs` without that dimension, between 0 and log(classes).

    Example:
        >>> entropy(torch.tensor([0.5, 0.5]))
        tensor(0.6931)
    """
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(dim)


def mutual_information(sample_probs: Tensor, dim: int = -1) -> Tensor:
    """Information in nats that the label would give about the weights (BALD, Houlsby et al. 2011).

    Args:
        sample_probs: Probabilities under each posterior sample, ``[S, B, …]``.
        dim: The classes' dimension.

    Returns:
        ``[B, …]`` without the classes, at least 0.

    Raises:
        ShapeError: If there is no sample dimension before the batch and the classes.

    Example:
        >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.6931])
    """
    if sample_probs.dim() < 3:
        raise ShapeError(f"sample_probs has shape {tuple(sample_probs.shape)}; expected [samples, batch, …, classes].")
    expected = entropy(sample_probs, dim).mean(0)
    return (entropy(sample_probs.mean(0), dim if dim < 0 else dim - 1) - expected).clamp_min(0)
