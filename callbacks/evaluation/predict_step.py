"""Prediction under samples, in place of a module's ``predict_step``.

Lightning's default step becomes a summary of the outputs. A user's own step runs under each sample, because what it returns
may be in other units than the output of ``forward``: a table of prices, key points, labels. Of each result
``r_s = step(θ_s)`` follow

    mean_s r_s,  Var_s r_s  and the quantiles of r_s          real values
    the most frequent r_s and the fraction that agrees        whole numbers

The step first runs once with ``self(...)`` averaged; what is no number is the result of this run. The runs under the samples
get the outputs of the same calls, so networks run once per sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.evaluation.results import Results, beside
from lightning_bayes.callbacks.evaluation.sampled_forward import SampledForward
from lightning_bayes.callbacks.evaluation.sampled_network import SampledCall
from lightning_bayes.callbacks.evaluation.written_files import written_files
from lightning_bayes.callbacks.trainer.batch_reader import unchanged
from lightning_bayes.callbacks.trainer.forward_arguments import ForwardArguments
from lightning_bayes.predictive.repeated import Repeatable, copied
from lightning_bayes.private_torch import own_parameters


def replace_predict_step(forward: SampledForward, once: bool) -> None:
    """Predict under samples until `forward` is stopped."""
    module = forward.network.module
    is_default = getattr(module.predict_step, "__func__", None) is LightningModule.predict_step
    step = DefaultPredictStep(forward) if is_default else OwnPredictStep(forward, once)
    # Lightning reads the signature.
    forward.patches.set(
        module, "predict_step", functools.wraps(module.predict_step)(lambda *args, **kwargs: step(*args, **kwargs))
    )


@final
class DefaultPredictStep:
    """Lightning's own step: ``self(batch)``, with the uncertainty of the outputs."""

    def __init__(self, forward: SampledForward) -> None:
        network = forward.network
        self._forward, self._network = forward, network
        self._arguments = ForwardArguments(network.module, network.own, network.average.likelihood.inputs)

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict one batch."""
        own = self._network.own
        with torch.no_grad():
            if not self._arguments.is_known:
                self._arguments.call(own, copied(batch))  # a call that fails must not use up samples
            call = self._arguments.call(functools.partial(Repeatable, own), batch)
            return self._network.summary(self._forward.run(call))


@final
class OwnPredictStep:
    """A user's step under each sample, or once with ``self(...)`` averaged in it."""

    def __init__(self, forward: SampledForward, once: bool) -> None:
        self._forward, self._network, self._once = forward, forward.network, once
        self._step: Callable[..., Any] = self._network.module.predict_step
        self._is_first = True
        self._calls_layers = False  # outside of ``forward``
        self._results = Results(type(self._network.module).__name__, self._network.average.interval)
        forward.keeps_all = not once

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Predict one batch."""
        forward, step = self._forward, Repeatable(self._step, *args, **kwargs)
        random_state = torch.get_rng_state()
        result = self._first_run(step)
        calls, has_calls = forward.calls, forward.count > 0
        only = forward.finish_step()
        of_forward = {} if only is None else self._network.columns(only)
        if self._once or result is None or not (has_calls or self._calls_layers):
            return beside(result, {f"forward_{n}": v for n, v in of_forward.items() if n not in {"probs", "mean"}})
        samples = [self._run_under(index, step, calls, random_state) for index in range(self._network.samples.count)]
        forward.was_called = True
        forms = [form for call in calls for form in self._network.average.forms(call.outputs)]
        return self._results.averaged(result, samples, forms, of_forward)

    def _first_run(self, step: Callable[[], Any]) -> Any:
        """The result with ``self(...)`` averaged; the first batch shows whether the step may run again."""
        if not self._is_first:
            return step()
        self._is_first = False
        with written_files() as files, self._layers_watched():
            result = step()
        if files and not self._once:
            self._once, self._forward.keeps_all = True, False
            rank_zero_info(
                f"{type(self._network.module).__name__}.predict_step writes {files[0]}, so it runs once for each batch, "
                "with self(...) averaged over samples. The columns forward_... describe what forward returns, not what the "
                "step returns. Pass predict_once=True to run any step so, or write files in a callback."
            )
        return result

    @contextmanager
    def _layers_watched(self) -> Iterator[None]:
        """Context that notes whether the step calls layers outside of ``forward``."""

        def note(*_: Any) -> None:
            self._calls_layers = self._calls_layers or not self._network.is_running

        layers = [
            layer for child in self._network.module.children() for layer in child.modules() if own_parameters(layer)
        ]
        hooks = [layer.register_forward_pre_hook(note) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _run_under(self, index: int, step: Callable[[], Any], calls: list[SampledCall], state: torch.Tensor) -> Any:
        """The result under one sample, with the random numbers of the first run and the outputs of its calls."""
        network, remaining = self._network, iter(calls)
        samples, module = network.samples, network.module

        def replayed(*args: Any, **kwargs: Any) -> Any:
            known = next(remaining, None)
            # A graph leads to the arguments of its own run.
            if known is not None and not torch.is_grad_enabled() and known.call.equals(args, kwargs):
                return network.of_sample(known.raw, known.outputs, index)
            call = Repeatable(network.own, *args, **kwargs)
            with network.replaced_by(network.own):
                raw = samples.subset_outputs(module, call, [index])
            return network.of_sample(raw, network.average.tempered(raw), 0)

        of_layers = samples.sampled(module, index) if self._calls_layers else nullcontext()
        with network.replaced_by(replayed), unchanged(module), of_layers:
            torch.set_rng_state(state)
            return step()
