"""The Monte-Carlo predictive as one network, for programs without this package or without Python.

    p(y | x) ≈ (1/S) Σ_s p(y | x, θ_s)        with θ_1 … θ_S baked in

The file has S copies of the weights, so it is S times as large as the network's; parameters without noise are shared.
"""

from __future__ import annotations

import copy
import io
import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior, atomic_write
from lightning_bayes.predictive.links import Link, check_link, predicted
from lightning_bayes.predictive.samples import PosteriorSamples, at_posterior_mean, placed

_PACKAGES: Final = ("onnx", "onnxscript")
_VALUES: Final = ("mean", "variance")
_CLASSIFIER: Final = ("probs", "entropy", "mutual_information")


class Exported(NamedTuple):
    """An exported predictive."""

    path: Path
    outputs: tuple[str, ...]  # names in their order: probs, entropy, mutual_information; or mean, variance


@final
class MonteCarloNetwork(nn.Module):
    """S networks whose predictions are averaged; an ordinary module with fixed weights.

    Args:
        model: The trained architecture; its own weights do not matter.
        posterior: The posterior of its weights.
        samples: S, at least 1.
        link: As in `mc_predict`.
        seed: Seed of the weight samples, as in `mc_predict`.
        temperature: Logits are divided by it.

    Raises:
        HyperparameterError: If `samples` is below 1, or the posterior's width was chosen for the linearised predictive.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: AbstractPosterior,
        samples: int,
        link: Link = "softmax",
        seed: int = 0,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        check_link(link)
        if isinstance(posterior, ScaledPosterior) and posterior.linearized:
            raise HyperparameterError(
                "This posterior's width was chosen for the linearised predictive, which is not an average over networks and "
                "cannot be exported. Fit a width with PosteriorScale(linearized=False)."
            )
        self.link, self.temperature = link, temperature
        draws = PosteriorSamples(posterior.to(next(model.parameters()).device), samples, seed)
        with at_posterior_mean(model, posterior):
            shared = _without_noise(model, posterior)
            self.networks = nn.ModuleList(_copy(model, draws.weights(index), shared) for index in range(samples))
        self.requires_grad_(False)

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Predict.

        Args:
            *inputs: Of the model.

        Returns:
            ``(probs, entropy, mutual_information)``, or ``(mean, variance)`` for the identity link, as in `mc_predict`.
        """
        outputs = torch.stack([network(*inputs) for network in self.networks]) / self.temperature
        each = predicted(outputs, self.link)
        if self.link == "identity":
            return each.mean(0), each.var(0, correction=0)
        if self.link == "softmax":
            return each.mean(0), *_uncertainty(each, 2)
        return each.mean(0), *_uncertainty(torch.stack([each, 1 - each], -1), -1)


def export(
    model: nn.Module,
    posterior: AbstractPosterior,
    path: str | os.PathLike[str],
    inputs: Tensor | tuple[Tensor, ...],
    samples: int = 16,
    *,
    link: Link = "softmax",
    seed: int = 0,
    temperature: float = 1.0,
) -> Exported:
    """Write the Monte-Carlo predictive as one file, for `torch.export` or ONNX.

    It predicts what ``mc_predict`` with the same samples, link, seed and temperature does, for any size of batch.

    Args:
        model: The trained architecture; its own weights do not matter.
        posterior: The posterior of its weights.
        path: The file: ``.pt2`` for ``torch.export.load(path).module()``, ``.onnx`` for ONNX.
        inputs: An example of the model's input, one batch; only its shape counts.
        samples: S weight samples, whose weights are all in the file.
        link: As in `mc_predict`.
        seed: Seed of the weight samples.
        temperature: Logits are divided by it.

    Returns:
        The file and the names of its outputs.

    Raises:
        HyperparameterError: If the file's ending is unknown. A model that torch cannot trace is an `UnsupportedLayerError`.
        ModuleNotFoundError: If ONNX is asked for and not installed.

    Example:
        >>> import tempfile
        >>> from lightning_bayes.posteriors import MeanField
        >>> model = nn.Linear(2, 3, bias=False)
        >>> q = MeanField({"weight": torch.zeros(3, 2)}, {"weight": torch.ones(3, 2)}, {"weight": 1.0}, num_data=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = export(model, q, f"{folder}/tiny.pt2", torch.zeros(1, 2), samples=4)
        ...     network = torch.export.load(file.path).module()
        >>> file.outputs, network(torch.ones(5, 2))[0].shape
        (('probs', 'entropy', 'mutual_information'), torch.Size([5, 3]))
    """
    path = Path(path)
    if path.suffix not in {".pt2", ".onnx"}:
        raise HyperparameterError(f"{path}: the predictive is exported as .pt2 (torch.export) or .onnx.")
    missing = [name for name in _PACKAGES if find_spec(name) is None] if path.suffix == ".onnx" else []
    if missing:
        raise ModuleNotFoundError(
            f'{path} needs {" and ".join(missing)}, not installed here. Run: pip install "lightning-bayes[onnx]", or '
            "export a .pt2 file."
        )
    network = MonteCarloNetwork(model, posterior, samples, link, seed, temperature).eval()
    names = _VALUES if link == "identity" else _CLASSIFIER
    data = _traced(network, inputs, path.suffix, names)
    atomic_write(path, data, "exported predictive", "Free space, or choose another directory.")
    return Exported(path, names)


def _traced(
    network: MonteCarloNetwork, inputs: Tensor | tuple[Tensor, ...], ending: str, names: tuple[str, ...]
) -> bytes:
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    examples = tuple(each if len(each) > 1 else torch.cat([each, each]) for each in given)  # 1 would be a constant
    batch = torch.export.Dim("batch")
    shapes = (tuple({0: batch} for _ in examples),)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch to the authors of exporters
            # Strict, the default before torch 2.8, cannot name a buffer that several networks share.
            program = torch.export.export(network, examples, dynamic_shapes=shapes, strict=False)
            return _saved(program) if ending == ".pt2" else _onnx(program, names)
    except Exception as error:  # whatever a tracer raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedLayerError(
            f"{type(network.networks[0]).__name__} cannot be exported as {ending} ({reason}). Torch traces forward(): avoid "
            "branches on values and fixed batch sizes in it, take fewer samples if the file would pass 2 GiB, or serve the "
            "posterior file with Predictor."
        ) from error


def _saved(program: torch.export.ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _onnx(program: torch.export.ExportedProgram, names: tuple[str, ...]) -> bytes:
    written: Any = torch.onnx.export(program, (), dynamo=True, output_names=names, verbose=False)
    data: bytes = written.model_proto.SerializeToString()
    return data


def _without_noise(model: nn.Module, posterior: AbstractPosterior) -> dict[int, Tensor]:
    """The tensors that all samples have in common, by their identity."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    noisy = {id(value) for name, value in tensors if name in posterior.mean}
    return {id(value): copy.deepcopy(value) for _, value in tensors if id(value) not in noisy}


def _copy(model: nn.Module, weights: dict[str, Tensor], shared: dict[int, Tensor]) -> nn.Module:
    with placed(model, weights):
        return copy.deepcopy(model, dict(shared))


def _uncertainty(sample_probs: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Entropy and mutual information; see `decomposition`, whose special functions ONNX lacks."""
    total = _entropy(sample_probs.mean(0), dim if dim < 0 else dim - 1)
    expected = _entropy(sample_probs, dim).mean(0)
    return total, (total - expected).clamp_min(0)


def _entropy(probs: Tensor, dim: int) -> Tensor:
    return -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(dim)
