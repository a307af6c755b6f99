"""The first batches of the newest epoch of a fit, for statistics of training inputs: nothing is loaded a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, final

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_bayes.callbacks.trainer.forward_arguments import ForwardArguments
from lightning_bayes.likelihood.paths import leaves
from lightning_bayes.predictive.repeated import Repeatable, copied

EXAMPLES: Final = 512
FIRST_BATCHES: Final = 16  # enough for a mean; a callback need not look at later ones


@final
class TrainingInputs:
    """Copies of batches as steps get them, until they hold enough examples."""

    def __init__(self, most: int | None = None) -> None:
        self.batches, self._most = list[Any](), most

    def add(self, batch: Any, index: int) -> None:
        """Copy a batch of an epoch, whose first one forgets those of the last epoch."""
        if not index:
            self.batches = []
        is_enough = index == self._most or sum(map(examples_of, self.batches)) >= EXAMPLES
        if len(self.batches) == index and not is_enough:
            self.batches.append(copied(batch))

    def runs(self, trainer: Trainer, module: LightningModule) -> Iterator[Repeatable]:
        """Functions that each run the module on one batch."""
        return runs_of(trainer, module, map(copied, self.batches))


def examples_of(batch: Any) -> int:
    """The length of the first tensor of a batch; 1 without any."""
    first = next((leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor)), None)
    return len(first) if first is not None and first.dim() else 1


def runs_of(trainer: Trainer, module: LightningModule, batches: Any) -> Iterator[Repeatable]:
    """Functions that each call the module with the arguments of one batch."""
    arguments: Any = ForwardArguments(module)
    for batch in batches:
        yield Repeatable(_run, trainer, module, arguments.call, batch)


def _run(trainer: Trainer, module: LightningModule, call: Callable[..., Any], batch: Any) -> None:
    with trainer.precision_plugin.forward_context():
        call(module, batch)
