"""`Likelihood`: what a training loss says about the outputs of ``forward``, as one value.

It holds an entry for each output that the loss took, and how the training step called ``forward``. It is plain data in a
checkpoint and in a posterior file, readable without the user's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, final

from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.likelihood.base import OutputLikelihood
from lightning_bayes.likelihood.family import Family
from lightning_bayes.likelihood.inputs import Inputs
from lightning_bayes.likelihood.names import find_kind
from lightning_bayes.likelihood.paths import Path, leaf_at

_FORMAT: Final = 1  # of `Likelihood.state`
Departs: TypeAlias = Literal["", "weights", "function"]


@final
@dataclass(frozen=True)
class Targets:
    """Where a loss took its targets from, and which of them count.

    Attributes:
        path: Of the targets in the batch; None if the training step computes them, so that only the step can tell.
        ignored: The value of targets that do not count: an ``ignore_index``, a void class, or nan for missing values. None
            if all targets count.
        is_selected: Whether the step selects targets by a rule that their values do not tell, so that only the step can.
    """

    path: Path | None = None
    ignored: float | None = None
    is_selected: bool = False

    @property
    def is_known(self) -> bool:
        """Whether a batch alone tells the targets that count."""
        return self.path is not None and not self.is_selected


@final
@dataclass(frozen=True)
class ScoredOutput:
    """One term of a loss.

    Attributes:
        paths: Of the outputs of ``forward`` that the term takes: one, or several such as a mean and a variance.
        kind: The distribution of the targets.
        targets: Where they come from.
        departs: How the loss departs from the likelihood of its targets: ``"weights"`` of each target that only the step can
            tell, or a ``"function"`` of the outputs in place of weights, as in a focal loss. Empty if it does not.
    """

    paths: tuple[Path, ...]
    kind: OutputLikelihood
    targets: Targets = Targets()
    departs: Departs = ""

    def parts_of(self, output: Any) -> Any:
        """What the term takes of the output of ``forward``; a tuple for several paths."""
        parts = tuple(leaf_at(output, path) for path in self.paths)
        return parts if len(parts) > 1 else parts[0]


@final
@dataclass(frozen=True)
class Likelihood:
    """What a training loss says about the outputs of ``forward``.

    Attributes:
        outputs: The terms of the loss whose kind is known; leaves of ``forward``'s output that no term takes are means.
        inputs: How the step calls ``forward``; None if an argument is no entry of the batch.
    """

    outputs: tuple[ScoredOutput, ...] = ()
    inputs: Inputs | None = None

    @property
    def only(self) -> ScoredOutput | None:
        """The only term; None if there are none or several."""
        return self.outputs[0] if len(self.outputs) == 1 else None

    @property
    def classifies(self) -> bool:
        """Whether all outputs that the loss takes are logits of classes."""
        return bool(self.outputs) and all(scored.kind.has_temperature for scored in self.outputs)

    @property
    def is_known(self) -> bool:
        """Whether a batch alone tells the targets of all terms."""
        return all(scored.targets.is_known for scored in self.outputs)

    def of(self, path: Path) -> ScoredOutput | None:
        """The term that takes the output at a path; None without one."""
        return next((scored for scored in self.outputs if path in scored.paths), None)

    def completed(self, stated: OutputLikelihood | None) -> Likelihood:
        """This recorded value with a stated kind of its only output; raises a `HyperparameterError` if they contradict."""
        if stated is None:
            return self
        if not self.outputs:
            return replace(self, outputs=(ScoredOutput(((),), stated, Targets((1,))),))  # of pairs (inputs, targets)
        if self.only is None:
            names = ", ".join(f"{scored.kind!r} of {scored.paths}" for scored in self.outputs)
            raise HyperparameterError(
                f"The stated likelihood {stated!r} is one, but the training loss scores several outputs: {names}. Leave out "
                "link=..., or likelihood=..., to use the loss's."
            )
        kind = stated.completed(self.only.kind)
        paths = ((),) if isinstance(kind, Family) else self.only.paths  # a function takes all that forward returns
        return replace(self, outputs=(replace(self.only, kind=kind, paths=paths),))

    def state(self) -> dict[str, Any]:
        """This value as plain data."""
        outputs = [
            {
                "paths": [list(path) for path in scored.paths],
                "kind": scored.kind.state(),
                "targets": _plain(scored.targets),
                "departs": scored.departs,
            }
            for scored in self.outputs
        ]
        return {
            "format": _FORMAT,
            "outputs": outputs,
            "inputs": None if self.inputs is None else self.inputs.state(),
        }

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> Likelihood:
        """The value of `state`; a `PosteriorError` if a newer version of the package wrote it."""
        if state["format"] != _FORMAT:
            raise PosteriorError(
                f"The likelihood is stored in format {state['format']!r}, but this version reads {_FORMAT!r}. Upgrade "
                "lightning-bayes."
            )
        inputs = state["inputs"]
        return Likelihood(tuple(map(_scored, state["outputs"])), None if inputs is None else Inputs.of_state(inputs))


def _scored(state: Mapping[str, Any]) -> ScoredOutput:
    targets = state["targets"]
    path = None if targets["path"] is None else tuple(targets["path"])
    return ScoredOutput(
        tuple(map(tuple, state["paths"])),
        OutputLikelihood.of_state(state["kind"]),
        Targets(path, targets["ignored"], targets["is_selected"]),
        state["departs"],
    )


def _plain(targets: Targets) -> dict[str, Any]:
    return {**vars(targets), "path": None if targets.path is None else list(targets.path)}


def stored_likelihood(state: Mapping[str, Any]) -> Likelihood:
    """The likelihood in a callback's state; of one from before it was stored, what its link says."""
    if state.get("likelihood") is not None:
        return Likelihood.of_state(state["likelihood"])
    link = state.get("link")
    return Likelihood() if link is None else Likelihood((ScoredOutput(((),), find_kind(link)),))
