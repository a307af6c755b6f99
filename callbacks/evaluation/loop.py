"""One loop under samples: the module's replaced ``forward``, and what is scored with each step."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.evaluation.mean_comparison import Comparison, MeanComparison
from lightning_bayes.callbacks.evaluation.observed_metrics import ObservedMetrics
from lightning_bayes.callbacks.evaluation.ood_sets import ends_test_set, ood_sets
from lightning_bayes.callbacks.evaluation.sampled_forward import SampledForward
from lightning_bayes.callbacks.evaluation.spread import distinct_sum
from lightning_bayes.likelihood import Raw
from lightning_bayes.predictive import SampledModule


@final
class SampledLoop:
    """A validation, test or prediction of a trainer. `compares` asks for scores of the mean beside those of the average."""

    def __init__(self, trainer: Trainer, forward: SampledForward, callback: str, compares: bool) -> None:
        self.forward, self._network, self._trainer, self._callback = forward, forward.network, trainer, callback
        module, average = self._network.module, self._network.average
        only = average.likelihood.only
        self._ood = ood_sets(trainer, module)
        self._metrics: ObservedMetrics | None = None
        self._comparison: MeanComparison | None = None
        if only is None or isinstance(only.kind, Raw):
            return
        if trainer.testing and only.kind.has_noise and not isinstance(module, SampledModule):
            self._metrics = ObservedMetrics(only, average.interval)
        if compares and self._network.samples.has_mean:
            self._comparison = MeanComparison(self._network, only)

    def end_step(self, returned: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score the step's only call of ``self(...)``."""
        call = self.forward.finish_step()
        if self._metrics is not None and call is not None:
            self._metrics.add(call, batch)
        if self._comparison is not None and not dataloader_idx:
            self._comparison.update(self._trainer, returned, batch, call)
        if self._trainer.testing and ends_test_set(self._trainer, batch_idx, dataloader_idx):
            self._log_comparison()
        if self._ood is not None:
            self._ood.add(self._trainer, call, batch_idx, dataloader_idx)

    def end_test(self) -> None:
        """Log the scores; print and log what averaging over samples has changed."""
        if self._metrics is not None:
            self._metrics.log(self._network.module)
        self._log_comparison()  # of a loader without a length

    def compared(self) -> Comparison | None:
        """The comparison with the mean, once."""
        comparison, self._comparison = self._comparison, None
        reduce = distinct_sum(self._trainer, self._network.module)
        return None if comparison is None else comparison.compute(reduce)

    def _log_comparison(self) -> None:
        compared = self.compared()
        if compared is not None:
            self._network.module.log_dict(compared.metrics(), on_epoch=True, add_dataloader_idx=False, batch_size=1)
            rank_zero_info(compared.report(self._callback, self._network.samples.count))
