"""Outputs of which the training loss says nothing: they are averaged as they are."""

from __future__ import annotations

from typing import Any, ClassVar, final

from torch import Tensor

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood.base import OutputLikelihood


@final
class Raw(OutputLikelihood):
    """Mean and variance of the outputs themselves.

    Args:
        why: What is known of the loss and why it is no likelihood, such as its name; empty if nothing is known.
    """

    name: ClassVar[str] = "raw"

    def __init__(self, why: str = "") -> None:
        self.why = why

    def log_prob(self, outputs: Any, targets: Tensor) -> Tensor:
        """Raise a `HyperparameterError`."""
        raise HyperparameterError(
            f"The distribution of the targets is not known{f': {self.why}' if self.why else ''}. Pass "
            "link='classification', 'binary', 'counts' or Gaussian(std); 'mean_variance' or 'mean_log_variance' for "
            "networks that return both; or a function from outputs to a torch.distributions."
        )

    def is_refined_by(self, stated: OutputLikelihood) -> bool:
        """Any kind may be stated."""
        return True
