"""Seeded label sampling for BackPACK, which otherwise uses torch's global generator."""

from __future__ import annotations

import math
from typing import Any, final

from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn

from lightning_bayes.curvature.private_backpack import layer_extension
from lightning_bayes.curvature.rules.random_numbers import seeded


def seed_labels(extension: Any, mc_samples: int, seed: int) -> None:
    """Make an extension such as ``KFAC(mc_samples)`` sample its labels from a seed, not from global generators."""
    for kind in (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss):
        original = layer_extension(extension, kind)
        if original is not None:
            extension.set_module_extension(kind, _SeededLabels(original, mc_samples, seed), overwrite=True)


@final
class _SeededLabels(ModuleExtension):  # type: ignore[misc]  # BackPACK ships no types
    """BackPACK's extension of a loss function, under a seed."""

    def __init__(self, original: ModuleExtension, mc_samples: int, seed: int) -> None:
        super().__init__()
        self.original, self.mc_samples, self.seed = original, mc_samples, seed

    def backpropagate(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: None) -> Tensor:
        """Columns ``[V, N, *outputs]`` of a square root of the loss's Hessian with respect to the outputs."""
        outputs: Tensor = module.input0
        if not outputs.isfinite().all():  # torch cannot sample labels; the loss is not finite and its update is skipped
            return outputs.new_full((self.mc_samples, *outputs.shape), math.nan)
        with seeded(outputs.device, self.seed):
            sampled: Tensor = self.original.backpropagate(extension, module, g_inp, g_out, columns)
        return sampled
