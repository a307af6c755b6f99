"""A posterior in one file: weights with their precision, and everything else that a prediction needs.

The file is a safetensors file (`posterior_format`), so reading it runs no code. A model card in Markdown lies beside it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn

from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.posteriors import (
    FAMILIES,
    AbstractPosterior,
    atomic_write,
    named_if_unreadable,
)
from lightning_bayes.predictive import Link, check_fits, check_link
from lightning_bayes.zoo.create import class_names as known_class_names
from lightning_bayes.zoo.create import input_transform
from lightning_bayes.zoo.model_card import model_card
from lightning_bayes.zoo.model_origin import origin_of, rebuilt
from lightning_bayes.zoo.posterior_folder import find_posterior
from lightning_bayes.zoo.posterior_format import FORMAT, POSTERIOR_FILE, VERSION, read_content, to_bytes
from lightning_bayes.zoo.transforms import ImageTransform

_CARD_REPLACES: Final = {".safetensors", ".pt", ".pth"}


@final
@dataclass(frozen=True)
class SavedPosterior:
    """The contents of a posterior file.

    Attributes:
        model: The architecture with the posterior mean as its weights, in evaluation mode.
        posterior: The posterior of its weights.
        transform: The transform of the model's input images; None if it is not known.
        class_names: Names of the classes in their order; empty if not known.
        metrics: Measured values by name.
        config: The training configuration.
        temperature: The temperature that logits are divided by, 1 without scaling.
        link: How outputs become predictions, see `mc_predict`.
    """

    model: nn.Module
    posterior: AbstractPosterior
    transform: ImageTransform | None
    class_names: tuple[str, ...]
    metrics: dict[str, float]
    config: dict[str, Any]
    temperature: float
    link: Link = "softmax"


def save_posterior(
    path: str | os.PathLike[str],
    model: nn.Module,
    posterior: AbstractPosterior,
    *,
    transform: ImageTransform | None = None,
    class_names: Sequence[str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    link: Link = "softmax",
    factory: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Path:
    """Write a posterior into one file, and a model card beside it.

    The model may be any module. `load` builds it again if `create_model` built it, if it is a LightningModule that calls
    ``save_hyperparameters``, or by `factory`; else `load` needs the model.

    If the file cannot be written, such as on a full disk, a `CheckpointError` says why, and a previous file stays intact.

    Args:
        path: The file, such as ``"digits.safetensors"``, whose card is ``digits.md``. The format is safetensors under any
            ending. Its folders are created.
        model: The model; its weights do not matter.
        posterior: The posterior of this model's weights; ``posterior.select("model.")`` extracts it from that of a task.
        transform: The transform of the model's input images; by default the model's `input_transform`.
        class_names: Names of the classes in their order; by default those of the data that the model was fitted to.
        metrics: Measured values, such as ``trainer.callback_metrics``.
        config: The training configuration, such as the YAML of the run; plain values only.
        temperature: The temperature that logits are divided by, such as from `lightning_bayes.predictive.fit_temperature`.
        link: How outputs become predictions, see `lightning_bayes.mc_predict`; ``"identity"`` for regression.
        factory: ``"package.module:function"``, a function or class that returns such a model.
        arguments: Keyword arguments of the factory, plain values; None keeps them out of the file.

    Returns:
        The model card's path.

    Raises:
        HyperparameterError: If a value is not plain, the number of class names is wrong, the temperature is not positive, or
            the path ends in ``.md``.

    Example:
        >>> import tempfile
        >>> from lightning_bayes.zoo import create_model
        >>> model = create_model("mlp", num_classes=2, in_channels=1, image_size=2, hidden=())
        >>> from lightning_bayes.posteriors import MeanField
        >>> mean = {name: p.detach() for name, p in model.named_parameters()}
        >>> q = MeanField(mean, {n: torch.ones_like(p) for n, p in mean.items()}, dict.fromkeys(mean, 1.0), num_data=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     card = save_posterior(f"{folder}/tiny.safetensors", model, q, class_names=["no", "yes"])
        ...     saved = load(f"{folder}/tiny.safetensors")
        >>> card.name, saved.class_names, saved.posterior.num_data
        ('tiny.md', ('no', 'yes'), 10)
    """
    check_fits(model, posterior)
    check_link(link)
    origin = origin_of(model, factory, arguments)
    transform = transform or input_transform(model)
    class_names = known_class_names(model) if class_names is None else class_names
    _check_fits(origin["arguments"] if "name" in origin else {}, class_names, temperature)
    card = card_of(Path(path))
    content: dict[str, Any] = {
        "architecture": origin,
        "transform": transform.to_dict() if transform is not None else None,
        "class_names": [str(name) for name in class_names],
        "metrics": {str(name): float(value) for name, value in (metrics or {}).items()},
        "config": dict(config or {}),
        "temperature": float(temperature),
        "link": link,
    }
    strange = _not_plain(content, "")
    if strange:
        raise HyperparameterError(
            f"A posterior file holds plain values only; these are not: {', '.join(strange)}. Turn them into text or numbers."
        )
    family = type(posterior).__name__
    data = to_bytes({**content, "family": family, "posterior": posterior.state_dict()})
    atomic_write(path, data, "posterior file", "Free space, or choose another directory.")
    card.write_text(model_card(Path(path).name, content, posterior), "utf-8")
    return card


def load(
    path: str | os.PathLike[str],
    map_location: str | torch.device = "cpu",
    *,
    model: nn.Module | None = None,
    allow: str | Sequence[str] = (),
) -> SavedPosterior:
    """Read a posterior file without running code from it.

    ``mc_predict(saved.model, saved.posterior, images, temperature=saved.temperature)`` predicts with it.

    Args:
        path: A file that `save_posterior` wrote, or its name; see `find_posterior`.
        map_location: Device of the tensors and the model.
        model: A network of the right architecture, which gets the posterior mean as its weights, in place; None builds one.
        allow: Packages whose code may build the network, such as ``"my_package"``; ``"__main__"`` is the running script.
            Models of the zoo need none.

    Returns:
        The posterior and the model that it belongs to.

    Raises:
        PosteriorError: If the file is of another kind, damaged, a pickle, or of a newer format, if nothing tells how to
            build its network, or that would run code of a package that is not in `allow`.
    """
    path = find_posterior(path)
    content = read_content(path, map_location)
    if content.get("format") != FORMAT:
        raise PosteriorError(
            f"{path} is not a posterior file. zoo.save_posterior writes one; load_posterior reads a Lightning checkpoint, "
            "and create_model(..., pretrained=path) weights alone."
        )
    version, family = content.get("version"), str(content.get("family"))
    if version not in range(1, VERSION + 1):
        raise PosteriorError(
            f"{path} has format {version!r}, but this package reads formats up to {VERSION}. Upgrade lightning-bayes if the "
            "file is newer; otherwise it is damaged, write it again."
        )
    if family not in FAMILIES:
        raise PosteriorError(
            f"{path} holds a posterior of the family {family}, but this package knows {', '.join(FAMILIES)}. Upgrade "
            "lightning-bayes if the file is newer; otherwise it is damaged, write it again."
        )
    with named_if_unreadable(path, POSTERIOR_FILE):
        return _decoded(content, path, map_location, model, allow)


def _decoded(
    content: dict[str, Any],
    path: Path,
    map_location: str | torch.device,
    model: nn.Module | None,
    allow: str | Sequence[str],
) -> SavedPosterior:
    posterior: AbstractPosterior = FAMILIES[content["family"]].from_state_dict(content["posterior"])
    origin = content["architecture"]
    model = rebuilt(origin, model, allow, str(path)).to(map_location).eval()
    check_fits(model, posterior)
    model.load_state_dict({**posterior.constants, **posterior.mean})
    transform = ImageTransform(**content["transform"]) if content["transform"] is not None else None
    class_names, temperature = tuple(map(str, content["class_names"])), float(content["temperature"])
    vars(model).update(zoo_transform=transform, zoo_class_names=class_names)
    _check_fits(origin["arguments"] if "name" in origin else {}, class_names, temperature)
    metrics = {str(name): float(value) for name, value in content["metrics"].items()}
    link = content.get("link", "softmax")  # of files that were written before there was one
    check_link(link)
    return SavedPosterior(model, posterior, transform, class_names, metrics, dict(content["config"]), temperature, link)


def _check_fits(arguments: Mapping[str, Any], class_names: Sequence[str], temperature: float) -> None:
    num_classes = arguments.get("num_classes", len(class_names))  # of a model from elsewhere it is not known
    if class_names and len(class_names) != num_classes:
        raise HyperparameterError(f"There are {len(class_names)} class_names for a model of {num_classes} classes.")
    if not 0 < temperature < math.inf:
        raise HyperparameterError(f"temperature={temperature} must be positive and finite.")


def card_of(path: Path) -> Path:
    """The place of a file's model card.

    Args:
        path: The posterior file.

    Returns:
        The card, whether it is there or not.

    Raises:
        HyperparameterError: If the file itself ends in ``.md``.
    """
    if path.suffix == ".md":
        raise HyperparameterError(
            f"{path} would be overwritten by its own model card. Take another ending, such as .safetensors."
        )
    return path.with_suffix(".md") if path.suffix in _CARD_REPLACES else path.with_name(f"{path.name}.md")


def _not_plain(value: Any, name: str) -> list[str]:
    """Names of the values that the file cannot hold."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in _not_plain(inner, f"{name}.{key}".lstrip("."))]
    if isinstance(value, (list, tuple)):
        return [found for i, inner in enumerate(value) for found in _not_plain(inner, f"{name}[{i}]")]
    plain = value is None or type(value) in {bool, int, float, str}
    return [] if plain else [f"{name} ({type(value).__name__})"]
