"""A posterior in one file: means, precisions, and everything else that prediction needs.

The file is in safetensors format, with all other values as JSON in the metadata, so reading it runs no code. Tensors are the
posterior's own, stored by path, such as ``posterior.mean.conv.weight``; nothing is computed again when they are read.
Safetensors has no checksum, so the metadata contains one over the tensors and the JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.likelihood import Likelihood, LinkArgument
from lightning_bayes.likelihood.value import stored_likelihood
from lightning_bayes.posteriors import FAMILIES, AbstractPosterior, FileKind, atomic_write, named_if_unreadable
from lightning_bayes.predictive import check_fits
from lightning_bayes.predictive.known_outputs import told_outputs
from lightning_bayes.zoo.create import class_names as known_class_names
from lightning_bayes.zoo.create import input_transform
from lightning_bayes.zoo.hub import card_of, find_posterior, model_card
from lightning_bayes.zoo.rebuilding import origin_of, rebuilt
from lightning_bayes.zoo.transforms import ImageTransform

FORMAT: Final = "lightning_bayes.posterior"
VERSION: Final = "2"  # another number for another content: files of other versions are refused
POSTERIOR_FILE: Final = FileKind(
    "a posterior file",
    PosteriorError,
    "Pickles are rejected, because reading one could run code. Otherwise, check that the file is complete.",
    "Restore it from an intact copy, or write it again.",
)
_TENSOR, _TUPLE = "$tensor", "$tuple"


@final
@dataclass(frozen=True)
class SavedPosterior:
    """The contents of a posterior file.

    Attributes:
        model: The network at the posterior mean, in evaluation mode.
        posterior: The posterior over its weights.
        transform: The transform of input images; None if unknown.
        class_names: Class names in order; empty if unknown.
        metrics: Metric values by name.
        config: The training configuration.
        temperature: Temperature that divides the logits; 1 means no scaling.
        likelihood: What the training loss said about the outputs; None if unknown.
    """

    model: nn.Module
    posterior: AbstractPosterior
    transform: ImageTransform | None
    class_names: tuple[str, ...]
    metrics: dict[str, float]
    config: dict[str, Any]
    temperature: float
    likelihood: Likelihood | None = None


def save_posterior(
    path: str | os.PathLike[str],
    model: nn.Module,
    posterior: AbstractPosterior,
    *,
    transform: ImageTransform | None = None,
    class_names: Sequence[str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    temperature: float | None = None,
    link: LinkArgument | Likelihood | None = None,
    factory: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Path:
    """Write a posterior file and a model card next to it.

    The model may be any module. `load` can rebuild it if it comes from `create_model`, if it is a LightningModule that calls
    ``save_hyperparameters``, if its class takes no arguments, or if `factory` is given. Otherwise, pass the model to `load`.

    If writing fails, a `CheckpointError` gives the reason and an existing file stays intact.

    Args:
        path: The file, such as ``"digits.safetensors"`` with the card ``digits.md``. The format is safetensors for
            any suffix. Missing folders are created.
        model: The model. Its current weights are not saved.
        posterior: The posterior over the model's weights. ``posterior.select("model.")`` extracts it from the posterior of a
            task.
        transform: The transform of input images; by default the model's `input_transform`.
        class_names: Class names in order; by default the class names of the data that the model was fitted on.
        metrics: Metric values by name, such as ``trainer.callback_metrics``.
        config: The training configuration, such as the YAML of the run; plain values only.
        temperature: Divides the logits, for example from `lightning_bayes.predictive.fit_temperature`; None: posterior's.
        link: What the outputs are, see `lightning_bayes.mc_predict`; None: the likelihood of the posterior.
        factory: ``"package.module:function"``, a function or class that builds the model.
        arguments: Keyword arguments of the factory, plain values. Without them, `load` needs the model.

    Returns:
        The path of the model card.

    Raises:
        HyperparameterError: If a value is not plain, the number of class names is wrong, the temperature is not positive, or
            the path ends in ``.md``.
    """
    check_fits(model, posterior)
    known = told_outputs(posterior, link)
    origin = origin_of(model, factory, arguments)
    temperature = posterior.temperature if temperature is None else float(temperature)
    transform = transform or input_transform(model)
    class_names = known_class_names(model) if class_names is None else class_names
    _check_values(origin, class_names, temperature)
    card = card_of(Path(path))
    content: dict[str, Any] = {
        "architecture": origin,
        "transform": transform.to_dict() if transform is not None else None,
        "class_names": [str(name) for name in class_names],
        "metrics": {str(name): float(value) for name, value in (metrics or {}).items()},
        "config": dict(config or {}),
        "temperature": temperature,
        "likelihood": None if known is None else known.state(),
    }
    not_plain = _not_plain(content, "")
    if not_plain:
        raise HyperparameterError(
            f"A posterior file can store plain values only, but got {', '.join(not_plain)}. Convert them to text or numbers."
        )
    data = to_bytes({**content, "family": type(posterior).__name__, "posterior": posterior.state_dict()})
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

    Args:
        path: A file written by `save_posterior`, or its name, with or without suffix: in the working directory, in
            `posterior_folder`, or one of this package, such as ``"lenet5-digits"``.
        map_location: Device of the tensors and the model.
        model: A network with the right architecture, whose weights are set to the posterior mean in place. None builds one.
        allow: Packages whose code may build the network, such as ``"my_package"``; ``"__main__"`` is the running script.
            Zoo models need none.

    Returns:
        The posterior and its model.

    Raises:
        PosteriorError: If the file is not a posterior file, is damaged, is a pickle or has another format; if it does not
            describe how to build the network; or if building it would run code of a package that is not in `allow`.
    """
    path = find_posterior(path)
    content = read_content(path, map_location)
    family = str(content.get("family"))
    if family not in FAMILIES:
        raise PosteriorError(
            f"{path} has a posterior of family {family}, but this package supports {', '.join(FAMILIES)}. Upgrade "
            "lightning-bayes, or write the file again."
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
    _check_values(origin, class_names, temperature)
    metrics = {str(name): float(value) for name, value in content["metrics"].items()}
    known = stored_likelihood(content) if content.get("likelihood") or content.get("link") else None
    posterior, config = posterior.with_likelihood(known), dict(content["config"])
    return SavedPosterior(model, posterior, transform, class_names, metrics, config, temperature, known)


def _check_values(origin: Mapping[str, Any], class_names: Sequence[str], temperature: float) -> None:
    is_zoo_model = "name" in origin  # the number of classes of other models is unknown
    num_classes = origin["arguments"]["num_classes"] if is_zoo_model else len(class_names)
    if class_names and len(class_names) != num_classes:
        raise HyperparameterError(f"Got {len(class_names)} class_names for a model with {num_classes} classes.")
    if not 0 < temperature < math.inf:
        raise HyperparameterError(f"temperature={temperature} must be positive and finite.")


def _not_plain(value: Any, name: str) -> list[str]:
    """Names and types of the values that a posterior file cannot store."""
    if isinstance(value, dict):
        items = {f"{name}.{key}".lstrip("."): item for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        items = {f"{name}[{index}]": item for index, item in enumerate(value)}
    elif value is None or type(value) in {bool, int, float, str}:
        return []
    else:
        return [f"{name} ({type(value).__name__})"]
    return [bad for item_name, item in items.items() for bad in _not_plain(item, item_name)]


def to_bytes(content: Mapping[str, Any]) -> bytes:
    """The bytes of a file with nested dictionaries, lists and tuples of tensors and plain values; keys become strings."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_without_tensors(content, "", tensors))
    metadata = {"format": FORMAT, "version": VERSION, "content": text, "sha256": _checksum(text, tensors)}
    data: bytes = save(tensors, metadata)
    return data


def read_content(path: str | os.PathLike[str], device: str | torch.device) -> dict[str, Any]:
    """The argument of `to_bytes` that wrote a file."""
    if zipfile.is_zipfile(path):
        raise PosteriorError(
            f"{path} is not a posterior file. Read a Lightning checkpoint with "
            "load_posterior, and a state dict with create_model(..., pretrained=path)."
        )
    with named_if_unreadable(path, POSTERIOR_FILE), safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise PosteriorError(f"{path} is not a posterior file, which only zoo.save_posterior writes.")
        if metadata.get("version") != VERSION:
            raise PosteriorError(
                f"{path} has format {metadata.get('version')!r}, but this version of lightning-bayes reads and writes "
                f"{VERSION!r}; write the file again with it, or install the version that wrote it."
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        if _checksum(metadata["content"], tensors) != metadata["sha256"]:
            raise PosteriorError(f"{path} is damaged: its checksum does not match. {POSTERIOR_FILE.instead}")
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        restored: dict[str, Any] = _with_tensors(json.loads(metadata["content"]), on_device)
        return restored


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Replace each tensor with a reference and copy the tensor into `tensors`."""
    if isinstance(value, Tensor):
        stored = value.detach().to("cpu", copy=True).contiguous()
        # A prior centred at the posterior mean is stored once.
        same = [name for name, other in tensors.items() if other.dtype == stored.dtype and other.equal(stored)]
        tensors.setdefault(name := (*same, path)[0], stored)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        prefix = f"{path}." if path else ""
        return {str(key): _without_tensors(inner, f"{prefix}{key}", tensors) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_without_tensors(inner, f"{path}.{index}", tensors) for index, inner in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    return value


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        if value.keys() == {_TUPLE}:
            return tuple(_with_tensors(inner, tensors) for inner in value[_TUPLE])
        return {key: _with_tensors(inner, tensors) for key, inner in value.items()}
    return [_with_tensors(inner, tensors) for inner in value] if isinstance(value, list) else value


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
