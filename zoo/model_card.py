"""The model card of a posterior file: a Markdown page with its content and a prediction in code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior

_FEW = 3  # prior precisions that are listed one by one


def model_card(file_name: str, content: dict[str, Any], posterior: AbstractPosterior) -> str:
    """The card of a posterior file.

    Args:
        file_name: Name of the file.
        content: The rest of the file's content.
        posterior: The posterior.

    Returns:
        Markdown.
    """
    return "\n".join(_lines(file_name, content, posterior)) + "\n"


def _lines(file_name: str, content: dict[str, Any], posterior: AbstractPosterior) -> Iterator[str]:
    built = content["architecture"]
    arguments = [f"{name}={value!r}" for name, value in (built["arguments"] or {}).items()]
    call = ", ".join([repr(built["name"]), *arguments] if "name" in built else arguments)
    place = "create_model" if "name" in built else built["factory"]
    weights = sum(mean.numel() for mean in posterior.mean.values())
    yield from (
        f"# {file_name}",
        "",
        "A Gaussian posterior over the weights of a neural network, written by lightning-bayes.",
        "",
    )
    yield from ("| | |", "|---|---|")
    yield f"| Architecture | `{place}({call})` |" if built["arguments"] is not None else f"| Architecture | `{place}` |"
    yield f"| Posterior | {type(posterior).__name__} over {weights} weights in {len(posterior.mean)} tensors |"
    if isinstance(posterior, ScaledPosterior):
        predictive = "linearised" if posterior.linearized else "sampled"
        inside = type(posterior.posterior).__name__
        yield f"| Width | {posterior.scale:.4g} × that of the {inside}, for the {predictive} predictive |"
    yield f"| Training examples N | {posterior.num_data:g} |"
    yield f"| Prior precision | {_prior(posterior)}, centred {_centres(posterior)} |"
    yield f"| Input | {_input(content['transform'])} |"
    if content["temperature"] != 1:
        yield f"| Temperature | {content['temperature']:.4g}, by which logits are divided |"
    yield f"| Classes | {', '.join(content['class_names']) or 'not named'} |"
    yield from (
        "",
        "```python",
        *_usage(file_name, content),
        "```",
    )
    if content["metrics"]:
        yield from ("", "## Measured", "", "| metric | value |", "|---|---|")
        yield from (f"| {name} | {value:.4g} |" for name, value in sorted(content["metrics"].items()))
    if content["config"]:
        yield from ("", "## Training", "", "```json", json.dumps(content["config"], indent=2), "```")


def _prior(posterior: AbstractPosterior) -> str:
    numbers = [delta for delta in posterior.prior_precision.values() if not isinstance(delta, Tensor)]
    if len(numbers) < len(posterior.prior_precision):
        return " to ".join(f"{end:.3g}" for end in posterior.prior_range()) + ", of each weight"
    return _numbers(sorted(set(numbers)))


def _numbers(values: list[float]) -> str:
    """A few numbers, or the range of many."""
    return ", ".join(f"{v:g}" for v in values) if len(values) <= _FEW else f"{values[0]:.3g} to {values[-1]:.3g}"


def _centres(posterior: AbstractPosterior) -> str:
    at_mean = [name for name, centre in posterior.prior_mean.items() if centre.equal(posterior.mean[name])]
    elsewhere = [name for name in posterior.prior_mean if name not in at_mean]
    if not posterior.prior_mean:
        return "at zero"
    parts = [f"at the mean, for {len(at_mean)} tensors"] * bool(at_mean)
    return "; ".join([*parts, *(["at other weights, for " + ", ".join(elsewhere)] if elsewhere else [])])


def _input(transform: dict[str, Any] | None) -> str:
    if transform is None:
        return "as in training; no transform is stored"
    size = transform["image_size"]
    return f"{len(transform['mean'])} × {size} × {size} pixels, mean {transform['mean']}, std {transform['std']}"


def _usage(file_name: str, content: dict[str, Any]) -> Iterator[str]:
    link, origin = content["link"], content["architecture"]
    given = "" if "name" in origin else f", allow={origin['factory'].partition(':')[0].partition('.')[0]!r}"
    given = ", model=network" if origin["arguments"] is None else given
    yield "from lightning_bayes import Predictor"
    yield ""
    yield f'predict = Predictor.load("{file_name}"{given})'
    images, floats = "predict(image)  # a path, a PIL image, or bytes", "predict(inputs)  # floats [B, ...]"
    yield f"prediction = {images if content['transform'] else floats}"
    columns = ("mean", "std") if link == "identity" else ("probs", "entropy", "mutual_information")
    yield ", ".join(f"prediction.{column}" for column in columns)
