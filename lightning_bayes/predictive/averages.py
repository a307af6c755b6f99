"""Average the outputs of ``forward`` over samples: each leaf by its own likelihood, in the same structure.

Leaves that no loss took are means; of whole numbers the most frequent is taken. What has no average, such as boxes of
differing number, is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from lightning_bayes.likelihood import (
    Family,
    Likelihood,
    OutputLikelihood,
    Path,
    Raw,
    ScoredOutput,
    leaf_at,
    with_leaf,
)
from lightning_bayes.likelihood.base import flattened, num_samples
from lightning_bayes.likelihood.mixtures import moments, observed
from lightning_bayes.likelihood.paths import leaves, mapped
from lightning_bayes.likelihood.predictions import AnyPrediction, as_dict, moments_of
from lightning_bayes.predictive.nested import Differing, average, refilled


@final
class OutputAverage:
    """Combines outputs under S samples, or summarises them.

    Args:
        likelihood: What the loss says about the outputs.
        temperature: Divides outputs whose likelihood has a temperature.
        interval: Probability of the central intervals of targets with known noise.
    """

    def __init__(self, likelihood: Likelihood, temperature: float = 1.0, interval: float = 0.9) -> None:
        self.likelihood, self.temperature, self.interval = likelihood, temperature, interval

    def tempered(self, outputs: Any) -> Any:
        """Outputs at the temperature, in at least single precision: averages of half precision would be rounded."""
        outputs = mapped(_precise, outputs)
        if self.temperature == 1:
            return outputs
        for scored in self._scored(outputs):
            if scored.kind.has_temperature:
                for path in scored.paths:
                    divided = mapped(lambda leaf: leaf / self.temperature, leaf_at(outputs, path))
                    outputs = with_leaf(outputs, path, divided)
        return outputs

    def combined(self, outputs: Any) -> Any:
        """One output that represents the average of ``[S, …]``; a leaf without an average stays `Differing`."""
        result = mapped(_unscored, outputs)
        for scored in self._scored(outputs):
            if scored.paths == ((),) and not isinstance(outputs, Tensor):
                return _combined_structure(outputs, scored.kind)
            parts = scored.kind.combine(scored.parts_of(outputs))
            for path, part in zip(scored.paths, parts if len(scored.paths) > 1 else [parts], strict=True):
                result = with_leaf(result, path, part)
        return result

    def summarised(self, outputs: Any) -> Any:
        """The same structure with a dictionary for each leaf: probabilities, or mean and variance."""
        return self.predicted(outputs, lambda prediction, kind: as_dict(prediction))

    def predicted(
        self,
        outputs: Any,
        convert: Callable[[AnyPrediction, OutputLikelihood], Any],
        summarise: Callable[[OutputLikelihood, Any], AnyPrediction] | None = None,
    ) -> Any:
        """The same structure with each leaf's prediction, as `convert` returns it for the leaf's likelihood.

        Args:
            outputs: Outputs under each sample, ``[S, …]``.
            convert: From a prediction and its likelihood to what stands in the leaf's place.
            summarise: From a likelihood and its outputs to the prediction; None is `OutputLikelihood.summarise`.

        Returns:
            The structure; the prediction alone if one term of the loss takes all outputs.
        """
        summary = summarise or (lambda kind, parts: kind.summarise(parts, self.interval))
        only = self.only(outputs)
        if only is not None:
            return convert(summary(only.kind, only.parts_of(outputs)), only.kind)
        result = mapped(lambda leaf: convert(moments_of(leaf), Raw()) if _is_real(leaf) else _unscored(leaf), outputs)
        for scored in self._scored(outputs):
            prediction = summary(scored.kind, scored.parts_of(outputs))
            result = with_leaf(result, scored.paths[0], convert(prediction, scored.kind))
        return result

    def only(self, outputs: Any) -> ScoredOutput | None:
        """The term that takes all outputs, whose summary is that of the whole; None for several."""
        of_whole = {(), *(path for path, _ in leaves(outputs))}
        scored = self._scored(outputs)
        return scored[0] if len(scored) == 1 and {(), *scored[0].paths} in ({()}, of_whole) else None

    def forms(self, outputs: Any) -> list[Tensor]:
        """Values ``[S, …]`` whose average is no mean: what the terms take, and its form after `combine`."""
        found = []
        for scored in self._scored(outputs):
            found += [leaf for path in scored.paths for _, leaf in leaves(leaf_at(outputs, path))]
            parts = scored.parts_of(outputs)
            if isinstance(parts, Tensor):
                found.append(torch.stack([scored.kind.combine(one[None]) for one in parts]))
        return found

    def states_less(self, outputs: Any, combined: Any) -> bool:
        """Whether the average states other moments of the targets than the mixture; its variance may be the loss's own."""
        only = self.only(outputs)
        if only is None or not isinstance(only.kind, Family):
            return False
        of_samples = observed(only.kind.distribution(flattened(outputs)), num_samples(outputs))
        mean, variance = moments(only.kind.distribution(combined))
        total = of_samples.aleatoric + of_samples.epistemic
        return not (
            _close(mean, of_samples.mean) and (_close(variance, total) or _close(variance, of_samples.aleatoric))
        )

    def _scored(self, outputs: Any) -> list[ScoredOutput]:
        """The terms whose leaves these outputs have, as stacked tensors."""
        found = [scored for scored in self.likelihood.outputs if all(_has(outputs, path) for path in scored.paths)]
        return [s for s in found if isinstance(outputs, Tensor) or () not in s.paths or isinstance(s.kind, Family)]


def _combined_structure(outputs: Any, kind: OutputLikelihood) -> Any:
    """The average of outputs whose likelihood is a function of the whole structure."""
    assert isinstance(kind, Family)
    of_leaves = Family(lambda values: kind.function(refilled(outputs, values)))
    return refilled(outputs, of_leaves.combine(tuple(leaf for _, leaf in leaves(outputs))))


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other.to(one), rtol=1e-3, atol=1e-6, equal_nan=True)


def _has(outputs: Any, path: Path) -> bool:
    """Whether outputs have stacked tensors at a path."""
    try:
        found = [leaf for _, leaf in leaves(leaf_at(outputs, path))]
    except (LookupError, AttributeError, TypeError):
        return False
    return bool(found) and all(isinstance(leaf, Tensor) for leaf in found)


def _precise(leaf: Any) -> Any:
    return leaf.to(torch.promote_types(leaf.dtype, torch.float32)) if _is_real(leaf) else leaf


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _unscored(leaf: Any) -> Any:
    """The average of whole numbers; values without one stay `Differing`."""
    return leaf if isinstance(leaf, Differing) else average(leaf)
