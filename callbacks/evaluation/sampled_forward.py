"""Replaces a module's ``forward`` by its average over samples.

While active, ``forward`` runs under S samples and combines their outputs into one of the same structure. Logits become the
**log of the mean probability**, so the user's cross-entropy and accuracy evaluate the Monte-Carlo predictive. Forward hooks
do not work here: under DDP, a step itself runs inside the module's forward.
"""

from __future__ import annotations

from typing import Any, final

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.callbacks.evaluation.sampled_network import SampledCall, SampledNetwork
from lightning_bayes.callbacks.trainer.patches import Patches
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import SampledModule
from lightning_bayes.predictive.repeated import Repeatable
from lightning_bayes.private_torch import is_in_functorch


@final
class SampledForward:
    """Replaces a module's ``forward`` while it is active.

    Attributes:
        calls: Of ``forward``, in the current step: the last one, or all.
        count: How many there were; those under a transform of `torch.func` are not among `calls`.
        keeps_all: Whether `calls` are all.
        was_called: Whether any step has called ``forward``.
    """

    def __init__(self, network: SampledNetwork, hint: str, lenient: bool = False) -> None:
        self.network, self.hint, self.lenient = network, hint, lenient
        self.calls: list[SampledCall] = []
        self.count, self.keeps_all, self.was_called = 0, False, False
        self._gave_up = False
        self.patches = Patches()

    def start(self) -> None:
        """Replace the module's methods."""
        patch, module = self.patches.set, self.network.module
        patch(module, "forward", self._combined)
        if isinstance(module, SampledModule):
            patch(module, "sampled_forward", self._outputs)
            patch(module, "averages", True)
            if self.network.samples.has_mean:
                patch(module, "mean_forward", self._at_mean)

    def stop(self, warn: bool = True) -> None:
        """Restore the module's methods, and warn by default if nothing was averaged."""
        self.patches.undo()
        if warn and not self.was_called:
            rank_zero_warn(
                f"{type(self.network.module).__name__}'s steps did not call self(...), so nothing was averaged: the results "
                f"use the module's current weights. Call self(x) in the steps, or {self.hint}."
            )

    def finish_step(self) -> SampledCall | None:
        """The only call of ``forward`` since the last step; None after none or several."""
        call = self.calls[-1] if self.count == 1 and self.calls else None
        self.calls, self.count = [], 0
        return call

    def run(self, call: Repeatable) -> SampledCall:
        """Run a call of the current step under every sample."""
        self.was_called = True
        sampled = self.network.run(call)
        kept = [] if is_in_functorch() else [sampled]  # whose tensors mean nothing outside of a transform
        self.calls = [*self.calls, *kept] if self.keeps_all else kept
        self.count += 1
        return sampled

    def _outputs(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs under every sample, ``[S, …]``."""
        return self.run(Repeatable(self.network.own, *args, **kwargs)).outputs

    def _at_mean(self, *args: Any, **kwargs: Any) -> Any:
        repeated = next((each.call for each in self.calls if each.call.takes(args, kwargs)), None)
        return self.network.at_mean(repeated or Repeatable(self.network.own, *args, **kwargs))

    def _combined(self, *args: Any, **kwargs: Any) -> Any:
        network = self.network
        if self._gave_up:
            return network.own(*args, **kwargs)
        call = Repeatable(network.own, *args, **kwargs)
        try:
            return network.combined(self.run(call))
        except UnsupportedTrainingError as error:
            if not self.lenient:
                raise
            rank_zero_warn(f"{error} The evaluation continues without averaging.")
            self._gave_up = True
            with network.replaced_by(network.own):
                return call()
