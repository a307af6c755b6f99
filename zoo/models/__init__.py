"""Plain ``nn.Module`` architectures, one per file."""

from __future__ import annotations

from lightning_bayes.zoo.models.lenet import LeNet5
from lightning_bayes.zoo.models.mlp import MLP

__all__ = ["MLP", "LeNet5"]
