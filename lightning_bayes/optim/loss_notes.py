"""What the losses of a training loop have told: a part of an optimizer's state, so that a resumed run opens equal passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor, nn

from lightning_bayes.likelihood import Likelihood
from lightning_bayes.likelihood.record import StepRecorder
from lightning_bayes.optim.groups import KEY

NOTES: Final = "notes"  # key in the optimizer's state_dict
_IN_GROUPS: Final = {
    "is_mean": "loss_is_mean",
    "writes_data": "writes_data",
    "likelihood": "likelihood",
}


@final
@dataclass
class LossNotes:
    """Plain data, for checkpoints."""

    is_mean: bool = False  # whether the last loss was a mean over its examples
    classifies: bool = False  # whether the first loss takes logits of classes
    writes_data: bool = False  # whether the training step uses ``param.data`` of a trained parameter
    likelihood: dict[str, Any] | None = None  # state of the first loss's `Likelihood`

    def load(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Restore the notes, which earlier versions kept in the first group; returns the state without such entries."""
        first, *others = state_dict["param_groups"]
        settings = dict(first.get(KEY, {}))
        earlier = {name: settings.pop(key) for name, key in _IN_GROUPS.items() if key in settings}
        stored = earlier | state_dict.get(NOTES, {})
        link = settings.pop("loss_link", None) or stored.pop("link", None)  # of earlier versions
        stored.setdefault("classifies", link in {"softmax", "sigmoid"})
        vars(self).update(vars(LossNotes()) | stored)
        return {**state_dict, "param_groups": [{**first, KEY: settings}, *others], NOTES: dict(vars(self))}

    @property
    def known_likelihood(self) -> Likelihood | None:
        """The likelihood of the first loss; None before it."""
        return None if self.likelihood is None else Likelihood.of_state(self.likelihood)

    def note_written(self, storages: Collection[int], trained: Iterable[nn.Parameter]) -> None:
        """Note whether the storages of ``.data`` that a pass used are those of trained parameters."""
        self.writes_data |= any(param.untyped_storage().data_ptr() in storages for param in trained)

    @contextmanager
    def noting(self, model: nn.Module, observe: Callable[[Tensor], None]) -> Iterator[Callable[[Tensor], None]]:
        """Context of a pass, which yields what is to get its loss: `observe`, after the first likelihood is noted."""
        if self.likelihood is not None:
            yield observe
            return
        recorder = StepRecorder(model)

        def observe_first(loss: Tensor) -> None:
            likelihood = recorder.likelihood(loss)
            self.likelihood, self.classifies = likelihood.state(), likelihood.classifies
            observe(loss)

        recorder.start(())
        try:
            yield observe_first
        finally:
            recorder.stop()
