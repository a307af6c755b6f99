"""Export the Monte-Carlo predictive as one network that runs without this package, or without Python.

    p(y | x) ≈ (1/S) Σ_s p(y | x, θ_s)        with fixed θ_1 … θ_S

The file holds S copies of the sampled weights; deterministic parameters are stored once.
"""

from __future__ import annotations

import copy
import io
import os
import warnings
from importlib.util import find_spec
from inspect import signature
from pathlib import Path as FilePath
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError
from lightning_bayes.likelihood import Likelihood, LinkArgument, Moments, OutputLikelihood, Path, Prediction, as_dict
from lightning_bayes.likelihood.base import flattened, num_samples
from lightning_bayes.likelihood.paths import leaves
from lightning_bayes.likelihood.predictions import moments_of
from lightning_bayes.posteriors import AbstractPosterior, atomic_write
from lightning_bayes.predictive.averages import OutputAverage
from lightning_bayes.predictive.known_outputs import known_outputs
from lightning_bayes.predictive.nested import stacked
from lightning_bayes.predictive.samples import PosteriorSamples, at_posterior_mean
from lightning_bayes.predictive.weights import temporary_weights

_PACKAGES: Final = ("onnx", "onnxscript")


class Exported(NamedTuple):
    """An exported predictive."""

    path: FilePath
    outputs: tuple[str, ...]  # names in order: probs, entropy, mutual_information; or mean, variance


@final
class MonteCarloNetwork(nn.Module):
    """An ordinary module with fixed weights that averages the predictions of S networks; arguments as in `export`."""

    def __init__(
        self,
        model: nn.Module,
        posterior: AbstractPosterior,
        samples: int,
        link: LinkArgument | Likelihood | None = None,
        seed: int = 0,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        if posterior.linearized:
            raise HyperparameterError(
                "This posterior's scale was fitted for the linearised predictive, which is not an average over networks and "
                "cannot be exported. Choose it with Calibration(linearized=False)."
            )
        self.known, self.temperature = known_outputs(posterior, link), temperature or posterior.temperature
        draws = PosteriorSamples(posterior.to(next(model.parameters()).device), samples, seed)
        with at_posterior_mean(model, posterior):
            shared = _deterministic_copies(model, draws.tensors(0))
            self.networks = nn.ModuleList(
                _sampled_copy(model, draws.tensors(index), shared) for index in range(samples)
            )
        self.requires_grad_(False)

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return ``(probs, entropy, mutual_information)``, or ``(mean, variance)`` of values, of each output."""
        return tuple(self.named(*inputs).values())

    def named(self, *inputs: Any) -> dict[str, Tensor]:
        """The results by name; of several outputs, with the path of each in front, such as ``logits_probs``."""
        found, scored = [network(*inputs) for network in self.networks], self.known.only
        if scored is not None:  # alone, whatever else the network returns
            parts = self._tempered(scored.kind, stacked([scored.parts_of(each) for each in found]))
            return as_dict(_summary(scored.kind, parts))
        average = OutputAverage(self.known, self.temperature)
        result = average.predicted(average.tempered(stacked(found)), lambda each, kind: as_dict(each), _summary)
        return {_name(path): leaf for path, leaf in leaves(result) if isinstance(leaf, Tensor)}

    def _tempered(self, kind: OutputLikelihood, parts: Any) -> Any:
        return parts if self.temperature == 1 or not kind.has_temperature else parts / self.temperature


def _summary(kind: OutputLikelihood, parts: Any) -> Prediction | Moments:
    """The prediction of classes; else mean and variance over samples of the targets' means, which torch can trace."""
    if kind.has_classes:
        prediction = kind.summarise(parts)
        assert isinstance(prediction, Prediction)
        return prediction
    return moments_of(torch.unflatten(kind.mean(flattened(parts)), 0, (num_samples(parts), -1)))


def _name(path: Path) -> str:
    """A result's name, such as ``heads_output_0_mean`` of the path ``("heads", 0, "mean")``."""
    return "_".join(key if isinstance(key, str) else f"output_{key}" for key in path)


def export(
    model: nn.Module,
    posterior: AbstractPosterior,
    path: str | os.PathLike[str],
    inputs: Tensor | tuple[Tensor, ...],
    samples: int = 16,
    *,
    link: LinkArgument | Likelihood | None = None,
    seed: int = 0,
    temperature: float | None = None,
) -> Exported:
    """Write the Monte-Carlo predictive to one file, in the format of `torch.export` or ONNX.

    An ONNX file names its inputs as the arguments of ``forward``, and their first dimension ``batch``.

    The exported network predicts the same as ``mc_predict`` with these samples, link, seed and temperature, for any batch
    size. The variance of values is that over samples, without noise. If the training loss takes several outputs, each has
    its results, named by its place in the model's output: ``logits_probs``, ``output_1_mean``. A model that torch cannot
    trace raises `UnsupportedLayerError`.

    Args:
        model: The trained architecture. Its own weights are not used.
        posterior: The posterior of its weights.
        path: The file: ``.pt2`` for ``torch.export.load(path).module()``, ``.onnx`` for ONNX.
        inputs: One batch of example inputs. Only their shapes and dtypes are used.
        samples: S, the number of weight samples, all stored in the file.
        link: As in `mc_predict`.
        seed: Seed of the weight samples.
        temperature: Divides the logits; None uses the posterior's.

    Returns:
        The file and the names of its outputs.

    Raises:
        HyperparameterError: If the file suffix is unknown.
        ModuleNotFoundError: If the suffix is ``.onnx`` and ONNX is not installed.
    """
    path = FilePath(path)
    if path.suffix not in {".pt2", ".onnx"}:
        raise HyperparameterError(f"{path}: the predictive can be exported as .pt2 (torch.export) or .onnx.")
    missing = [name for name in _PACKAGES if find_spec(name) is None] if path.suffix == ".onnx" else []
    if missing:
        raise ModuleNotFoundError(
            f'Exporting {path} requires {" and ".join(missing)}. Run: pip install "lightning-bayes[onnx]", or export a .pt2 '
            "file."
        )
    network = MonteCarloNetwork(model, posterior, samples, link, seed, temperature).eval()
    tensors = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    with torch.no_grad():
        names = tuple(network.named(*tensors))
    data = _traced(network, tensors, path.suffix, names)
    atomic_write(path, data, "exported predictive", "Free space, or choose another directory.")
    return Exported(path, names)


def _traced(network: MonteCarloNetwork, tensors: tuple[Tensor, ...], suffix: str, names: tuple[str, ...]) -> bytes:
    # Torch would trace a batch size of 1 as a constant.
    examples = tuple(tensor if len(tensor) > 1 else torch.cat([tensor, tensor]) for tensor in tensors)
    batch, arguments = torch.export.Dim("batch"), _input_names(network, len(tensors))
    shapes = (tuple({0: batch} for _ in examples),)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings address the authors of exporters
            # Strict mode, the default before torch 2.8, cannot name a buffer that several networks share.
            program = torch.export.export(network, examples, dynamic_shapes=shapes, strict=False)
            return _pt2_bytes(program) if suffix == ".pt2" else _onnx_bytes(program, arguments, names)
    except Exception as error:  # a tracer can raise any exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedLayerError(
            f"{type(network.networks[0]).__name__} cannot be exported as {suffix} ({reason}). Torch traces forward(): avoid "
            "branches on values and fixed batch sizes in it, use fewer samples if the file would exceed 2 GiB, or serve the "
            "posterior file with Predictor."
        ) from error


def _pt2_bytes(program: torch.export.ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _onnx_bytes(program: torch.export.ExportedProgram, inputs: list[str], names: tuple[str, ...]) -> bytes:
    options: dict[str, Any] = {"input_names": inputs, "output_names": names, "dynamo": True, "verbose": False}
    onnx_program: Any = torch.onnx.export(program, (), **options)
    proto = onnx_program.model_proto
    graph = proto.graph
    rows = {value.type.tensor_type.shape.dim[0].dim_param for value in graph.input}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in rows:  # a symbol of torch, such as s21
                dim.dim_param = "batch"
    data: bytes = proto.SerializeToString()
    return data


def _input_names(network: MonteCarloNetwork, count: int) -> list[str]:
    """The names of the arguments of ``forward``; without them, numbered ones."""
    arguments = signature(network.networks[0].forward).parameters.values()
    names = [each.name for each in arguments if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
    return names[:count] if len(names) >= count else [f"input_{index}" for index in range(count)]


def _deterministic_copies(model: nn.Module, sample: dict[str, Tensor]) -> dict[int, Tensor]:
    """Copies of the tensors that all samples share, by the id of the original: a memo for `copy.deepcopy`."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    sampled = {id(value) for name, value in tensors if name in sample}
    return {id(value): copy.deepcopy(value) for _, value in tensors if id(value) not in sampled}


def _sampled_copy(model: nn.Module, tensors: dict[str, Tensor], shared: dict[int, Tensor]) -> nn.Module:
    with temporary_weights(model, tensors):
        return copy.deepcopy(model, dict(shared))
