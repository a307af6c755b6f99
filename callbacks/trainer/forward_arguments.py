"""What a batch passes to ``forward`` where a callback calls it in place of a user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, final

from lightning.pytorch import LightningModule

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood.inputs import Arguments, Inputs, arguments_of, num_required


@final
class ForwardArguments:
    """Calls a function of ``forward``'s arguments with those of a batch, and remembers the form that worked."""

    def __init__(
        self, module: LightningModule, forward: Callable[..., Any] | None = None, inputs: Inputs | None = None
    ) -> None:
        self._module, self._forward = module, forward or module.forward  # which a sampled forward replaces
        self._inputs = inputs  # how the training step calls ``forward``
        self._form: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether a call has shown which form suits ``forward``."""
        return self._form is not None

    def call(self, function: Callable[..., Any], batch: Any) -> Any:
        """Call ``function(*args, **kwargs)``; raises `UnsupportedTrainingError` if no form of the batch suits."""
        forms = list(self._forms(batch))
        if self._form is not None and self._form < len(forms):
            args, kwargs = forms[self._form]
            return function(*args, **kwargs)
        failures: list[Exception] = []
        for index, (args, kwargs) in enumerate(forms):
            try:
                result = function(*args, **kwargs)
            except UnsupportedTrainingError:
                raise
            except Exception as error:  # whatever a user's forward raises for arguments of another form
                failures.append(error)
                continue
            self._form = index
            return result
        raise self._unsuited(batch, failures[-1]) from failures[-1]

    def _forms(self, batch: Any) -> Iterator[Arguments]:
        yield (batch,), {}
        if isinstance(batch, Mapping):
            yield arguments_of(self._forward, batch, self._inputs)
        elif isinstance(batch, (tuple, list)) and batch:
            with suppress(LookupError, AttributeError, TypeError):  # an entry that this batch lacks
                if self._inputs is not None:
                    yield self._inputs.of(batch)
            yield tuple(batch[: max(1, num_required(self._forward))]), {}

    def _unsuited(self, batch: Any, error: Exception) -> UnsupportedTrainingError:
        name, kind = type(self._module).__name__, type(batch).__name__
        keys = f" with the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        return UnsupportedTrainingError(
            f"{name} does not override predict_step, so forward received the whole batch, a {kind}{keys}, and failed: "
            f"{error}. Define {name}.predict_step(self, batch, batch_idx) that calls self(...) on the batch's inputs."
        )
