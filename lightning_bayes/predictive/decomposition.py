"""Predictive uncertainty and its decomposition: entropy = aleatoric part + mutual information (epistemic), in nats.

H[p̄] = -Σ_c p̄_c log p̄_c        I = H[p̄] - (1/S) Σ_s H[p_s]        p̄ = (1/S) Σ_s p_s
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.errors import ShapeError


def entropy(probs: Tensor, dim: int = -1) -> Tensor:
    """Shannon entropy in nats of probabilities that sum to one along `dim`, which the result lacks."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(dim)


def mutual_information(sample_probs: Tensor, dim: int = -1) -> Tensor:
    """Mutual information between label and weights (BALD) in nats, ``[B, …]``, from probabilities ``[S, B, …]``."""
    if sample_probs.dim() < 3:
        raise ShapeError(f"sample_probs has shape {tuple(sample_probs.shape)}; expected [samples, batch, …, classes].")
    expected = entropy(sample_probs, dim).mean(0)
    return (entropy(sample_probs.mean(0), dim if dim < 0 else dim - 1) - expected).clamp_min(0)
