"""The model card of a posterior file: a Markdown page with its contents and a code example for prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior

_MAX_LISTED = 3  # more prior precisions than this are shown as a range


def model_card(file_name: str, content: dict[str, Any], posterior: AbstractPosterior) -> str:
    """The Markdown model card of a posterior file; `content` is the contents of the file without the posterior."""
    return "\n".join(_lines(file_name, content, posterior)) + "\n"


def _lines(file_name: str, content: dict[str, Any], posterior: AbstractPosterior) -> Iterator[str]:
    num_weights = sum(mean.numel() for mean in posterior.mean.values())
    yield f"# {file_name}"
    yield ""
    yield "A Gaussian posterior over the weights of a neural network, written by lightning-bayes."
    yield ""
    yield from ("| | |", "|---|---|")
    yield f"| Architecture | `{_architecture(content['architecture'])}` |"
    yield f"| Posterior | {type(posterior).__name__} over {num_weights} weights in {len(posterior.mean)} tensors |"
    if isinstance(posterior, ScaledPosterior):
        predictive = "linearised" if posterior.linearized else "sampled"
        unscaled = type(posterior.posterior).__name__
        yield f"| Width | {posterior.scale:.4g} × the {unscaled} width, for the {predictive} predictive |"
    yield f"| Training examples N | {posterior.num_data:g} |"
    yield f"| Prior precision | {_prior_precision(posterior)}, centred {_prior_mean(posterior)} |"
    yield f"| Input | {_input(content['transform'])} |"
    if content["temperature"] != 1:
        yield f"| Temperature | {content['temperature']:.4g}, divides the logits |"
    yield f"| Classes | {', '.join(content['class_names']) or 'not named'} |"
    yield from ("", "```python", *_usage(file_name, content), "```")
    if content["metrics"]:
        yield from ("", "## Metrics", "", "| metric | value |", "|---|---|")
        yield from (f"| {name} | {value:.4g} |" for name, value in sorted(content["metrics"].items()))
    if content["config"]:
        yield from ("", "## Training", "", "```json", json.dumps(content["config"], indent=2), "```")


def _architecture(origin: dict[str, Any]) -> str:
    if origin["arguments"] is None:
        return str(origin["factory"])
    arguments = [f"{name}={value!r}" for name, value in origin["arguments"].items()]
    if "name" in origin:
        return f"create_model({', '.join([repr(origin['name']), *arguments])})"
    return f"{origin['factory']}({', '.join(arguments)})"


def _prior_precision(posterior: AbstractPosterior) -> str:
    scalars = [value for value in posterior.prior_precision.values() if not isinstance(value, Tensor)]
    if len(scalars) < len(posterior.prior_precision):
        return " to ".join(f"{end:.3g}" for end in posterior.prior_range()) + ", per weight"
    values = sorted(set(scalars))
    if len(values) <= _MAX_LISTED:
        return ", ".join(f"{value:g}" for value in values)
    return f"{values[0]:.3g} to {values[-1]:.3g}"


def _prior_mean(posterior: AbstractPosterior) -> str:
    if not posterior.prior_mean:
        return "at zero"
    at_mean = [name for name, center in posterior.prior_mean.items() if center.equal(posterior.mean[name])]
    elsewhere = [name for name in posterior.prior_mean if name not in at_mean]
    parts = []
    if at_mean:
        parts.append(f"at the posterior mean for {len(at_mean)} tensors")
    if elsewhere:
        parts.append(f"at other values for {', '.join(elsewhere)}")
    return "; ".join(parts)


def _input(transform: dict[str, Any] | None) -> str:
    if transform is None:
        return "as in training; no transform is stored"
    size = transform["image_size"]
    return f"{len(transform['mean'])} × {size} × {size} pixels, mean {transform['mean']}, std {transform['std']}"


def _usage(file_name: str, content: dict[str, Any]) -> Iterator[str]:
    origin, extra = content["architecture"], ""
    if origin["arguments"] is None:
        extra = ", model=network"
    elif "name" not in origin:
        extra = f", allow={origin['factory'].partition(':')[0].partition('.')[0]!r}"
    yield "from lightning_bayes import Predictor"
    yield ""
    yield f'predict = Predictor.load("{file_name}"{extra})'
    if content["transform"]:
        yield "prediction = predict(image)  # a path, a PIL image, or bytes"
    else:
        yield "prediction = predict(inputs)  # floats [B, ...]"
    fields = ("mean", "std") if content["link"] == "identity" else ("probs", "entropy", "mutual_information")
    yield ", ".join(f"prediction.{name}" for name in fields)
