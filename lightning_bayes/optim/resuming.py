"""What a state must agree with to be loaded, and which settings of the file are kept.

| | under another value |
|---|---|
| algorithm, step, the optimizer that moves the mean | refused: the state has another meaning |
| parameter groups: their parameters and order | refused: state is stored by position |
| parameters with a posterior (``bayesian=``) | refused: their curvature is missing, or would be lost |
| learning rate, noise, prior, intervals, seed, other settings of a group | kept from the file; callbacks say so |
| number of training examples, where it is counted | follows the data |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from lightning_bayes.errors import PosteriorError, name_some
from lightning_bayes.optim.groups import FORMAT
from lightning_bayes.optim.optimizer import NoisyOptimizer
from lightning_bayes.optim.parameters import stored_names

RECORD: Final = "record"  # key in the optimizer's state_dict
_MUST_AGREE: Final = {
    "algorithm": "the algorithm",
    "step": "the step",
    "base": "the optimizer that moves the mean",
    "groups": "the parameter groups",
    "posterior": "the parameters with a posterior",
}
_LENGTH = 60  # characters of names in a message


def record_of(
    optimizer: NoisyOptimizer, step: str, base: Optimizer | None, without_noise: Collection[Tensor] | None
) -> dict[str, Any]:
    """What a state must agree with to be loaded; `without_noise` are the parameters without, None for all."""
    names = stored_names(optimizer.model)
    groups = [group["params"] for group in optimizer.param_groups]
    noisy = (p for params in groups for p in params if without_noise is not None and p not in without_noise)
    return {
        "algorithm": type(optimizer).__name__,
        "step": step,
        "base": type(base).__name__ if base is not None else None,
        "groups": [[names.get(param, str(tuple(param.shape))) for param in params] for params in groups],
        "posterior": sorted(names[param] for param in noisy if param in names),
    }


def require_same(state_dict: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Require that a state was saved under the same format, algorithm, step, groups and parameters with a posterior."""
    if state_dict.get("format") != FORMAT:
        raise PosteriorError(
            f"The state has format {state_dict.get('format')!r}, and this version reads format {FORMAT}. Resume it with the "
            "version that wrote it, or start a new fit from its weights."
        )
    saved = state_dict[RECORD]
    differences = [
        f"{words} (saved: {_said(saved[name], record[name])}; now: {_said(record[name], saved[name])})"
        for name, words in _MUST_AGREE.items()
        if saved[name] != record[name]
    ]
    if differences:
        raise PosteriorError(
            f"The run cannot resume, because these have changed: {', '.join(differences)}. Restore the old setting; or, to "
            "start anew from the weights alone, load them into the model and train without the state (without ckpt_path)."
        )


def _said(value: Any, other: Any) -> str:
    """A value for a message; of parameter names, those that the other value does not have, or all of them in order."""
    if not isinstance(value, list):
        return str(value or "none")
    if value and isinstance(value[0], list):
        return " | ".join(name_some(group, _LENGTH) for group in value)
    own = [name for name in value if name not in other]
    return f"{len(value)}, with {name_some(own, _LENGTH)}" if own else str(len(value))
