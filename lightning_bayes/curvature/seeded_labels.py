"""Labels that BackPACK draws from a seed of the caller's; by itself it draws them from torch's global generator."""

from __future__ import annotations

import math
from typing import Any, final

from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn

from lightning_bayes.curvature.private_backpack import layer_extension
from lightning_bayes.curvature.rules.random_numbers import seeded


def seed_labels(extension: Any, mc_samples: int, seed: int) -> None:
    """Let an extension of BackPACK draw labels from a seed, and leave the global generators alone.

    Args:
        extension: Such as ``backpack.extensions.KFAC(mc_samples)``.
        mc_samples: Labels that it draws for each example.
        seed: The seed.
    """
    for kind in (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss):
        theirs = layer_extension(extension, kind)
        if theirs is not None:
            extension.set_module_extension(kind, _SeededLabels(theirs, mc_samples, seed), overwrite=True)


@final
class _SeededLabels(ModuleExtension):  # type: ignore[misc]  # BackPACK ships no types
    """BackPACK's extension of a loss function, under a seed."""

    def __init__(self, theirs: ModuleExtension, mc_samples: int, seed: int) -> None:
        super().__init__()
        self.theirs, self.mc_samples, self.seed = theirs, mc_samples, seed

    def backpropagate(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: None) -> Tensor:
        """Columns ``[V, N, *outputs]`` of a square root of the loss's Hessian by the outputs."""
        outputs: Tensor = module.input0
        if (
            not outputs.isfinite().all()
        ):  # torch draws no label there; the loss is not finite, and its update is skipped
            return outputs.new_full((self.mc_samples, *outputs.shape), math.nan)
        with seeded(outputs.device, self.seed):
            found: Tensor = self.theirs.backpropagate(extension, module, g_inp, g_out, columns)
        return found
