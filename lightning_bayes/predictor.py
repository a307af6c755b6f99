"""Serving a posterior file: images or arrays in, probabilities with their uncertainty out.

    predict = Predictor.load("posterior.safetensors")
    predict("cat.jpg").labels, predict(array).entropy

A prediction is rejected where its largest probability lies below a threshold (Chow 1970, the optimal rule for calibrated
probabilities): it goes to a person, or to a better model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.posteriors import ScaledPosterior
from lightning_bayes.predictive import (
    Exported,
    Moments,
    PosteriorSamples,
    Prediction,
    as_input,
    check_threshold,
    evaluation_mode,
    export,
    seen_through,
    summarise,
)

if TYPE_CHECKING:  # the zoo loads torchvision, which a posterior of tables does not need
    from lightning_bayes.zoo import SavedPosterior


class ClassPrediction(NamedTuple):
    """The prediction of a classifier."""

    probs: Tensor  # averaged over weight samples: [B, C]; [B, …] of independent Bernoullis
    entropy: Tensor  # total uncertainty in nats, [B]
    mutual_information: Tensor  # epistemic part in nats, [B]
    classes: Tensor  # index of the largest probability, [B]
    labels: tuple[str, ...]  # names of `classes`; empty if the file names none
    reject: Tensor | None  # [B], bool; None without a threshold


class ValuePrediction(NamedTuple):
    """The prediction of a regression network."""

    mean: Tensor  # over weight samples, [B, …]
    std: Tensor  # over weight samples, so without the noise of the targets, [B, …]


@final
class Predictor:
    """Predicts with a saved posterior, under the same weight samples in every call.

    Args:
        saved: A posterior file's contents, from `lightning_bayes.zoo.load`.
        samples: S, the number of weight samples, at least 1.
        seed: Seed of the weight samples.
        reject_below: Predictions whose largest probability is smaller are marked in ``reject``; None marks none. A
            `lightning_bayes.predictive.Rejector` finds a threshold with a guarantee.
        device: Device of the computation and its results.

    Attributes:
        saved: The posterior, its model, its transform and its class names.

    Raises:
        HyperparameterError: If `samples` or `reject_below` is out of range.

    Example:
        >>> import numpy as np, tempfile
        >>> from lightning_bayes import MeanField, zoo
        >>> model = zoo.create_model("mlp", num_classes=2, in_channels=1, image_size=2, hidden=())
        >>> mean = {name: p.detach() for name, p in model.named_parameters()}
        >>> q = MeanField(mean, {n: torch.ones_like(p) for n, p in mean.items()}, dict.fromkeys(mean, 1.0), num_data=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/tiny.safetensors"
        ...     _ = zoo.save_posterior(path, model, q, class_names=["no", "yes"])
        ...     predict = Predictor.load(path, samples=8, reject_below=0.9)
        >>> answer = predict(np.zeros((3, 1, 2, 2)))  # floats are the model's input
        >>> answer.probs.shape, len(answer.labels), answer.reject.dtype
        (torch.Size([3, 2]), 3, torch.bool)
    """

    def __init__(
        self,
        saved: SavedPosterior,
        *,
        samples: int = 32,
        seed: int = 0,
        reject_below: float | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        check_threshold(reject_below)
        self.saved, self.reject_below, self.samples, self.seed = saved, reject_below, samples, seed
        self._model = saved.model.to(device)
        self._posterior = posterior = saved.posterior.to(device)
        linearized = isinstance(posterior, ScaledPosterior) and posterior.linearized
        self._draws = seen_through(PosteriorSamples(posterior, samples, seed), linearized, saved.link)
        self._example = next(iter(posterior.mean.values()))  # of the weights' device and type

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        allow: str | Sequence[str] = (),
        **options: Any,
    ) -> Predictor:
        """Read a posterior file.

        Args:
            path: A file of `lightning_bayes.zoo.save_posterior`, or its name; see `lightning_bayes.zoo.load`.
            model: A network for it; needed if the file does not say how to build one.
            allow: Packages whose code may build the network of the file.
            **options: Arguments of the class.

        Returns:
            The predictor.
        """
        from lightning_bayes.zoo import load

        return cls(load(path, model=model, allow=allow), **options)

    def export(self, path: str | os.PathLike[str], inputs: Tensor | None = None) -> Exported:
        """Write this predictor as one network, whose input is the model's; see `lightning_bayes.export`.

        Args:
            path: The file, ``.pt2`` or ``.onnx``.
            inputs: An example of the model's input, one batch; by default an image of the file's transform.

        Returns:
            The file and the names of its outputs.

        Raises:
            HyperparameterError: If there is neither an example nor a transform.
        """
        transform, saved = self.saved.transform, self.saved
        if inputs is None and transform is None:
            raise HyperparameterError("The posterior file holds no transform: pass an example of the model's inputs.")
        if inputs is None and transform is not None:
            inputs = torch.zeros(2, len(transform.mean), transform.image_size, transform.image_size)
        example = self._placed(inputs)
        scaled = {"temperature": saved.temperature}
        return export(
            self._model, self._posterior, path, example, self.samples, link=saved.link, seed=self.seed, **scaled
        )

    @torch.no_grad()
    def __call__(self, inputs: Any) -> ClassPrediction | ValuePrediction:
        """Predict.

        Args:
            inputs: See `prepare`.

        Returns:
            One row for each example.
        """
        batch = self.prepare(inputs)
        with evaluation_mode(self._model):
            outputs = self._draws.outputs(self._model, lambda: self._model(batch))
        found = summarise(outputs / self.saved.temperature, self.saved.link)
        if isinstance(found, Moments):
            return ValuePrediction(found.mean, found.variance.sqrt())
        return self._classified(found)

    def prepare(self, inputs: Any) -> Any:
        """The model's input.

        Args:
            inputs: An image or several: paths, PIL images, bytes as NumPy gives them (``[H, W]``, ``[H, W, C]`` or
                ``[B, H, W, C]``), or bytes as torchvision gives them (``[C, H, W]`` or ``[B, C, H, W]``). They pass through
                the transform in the file. Anything else, such as floats ``[B, …]``, is the model's input as it is.

        Returns:
            One batch, on the device of the weights; floats have their precision.

        Raises:
            ShapeError: If a list is empty or its images differ in shape after the transform.
        """
        if isinstance(inputs, (list, tuple)):
            if not inputs:
                raise ShapeError("There is nothing to predict: the list of inputs is empty. Pass at least one.")
            return torch.cat([self._one(each) for each in inputs])
        return self._one(inputs)

    def _one(self, image: Any) -> Any:
        if isinstance(image, (str, os.PathLike)):
            from lightning_bayes.zoo.data.images import read_image

            image = read_image(Path(image))
        if isinstance(image, np.ndarray):
            image = torch.from_numpy(np.ascontiguousarray(_channels_first(image)))
        is_picture = hasattr(image, "getbands")  # of PIL
        if is_picture or (isinstance(image, Tensor) and image.dtype == torch.uint8):
            image = self._transformed(image)
            image = image if image.ndim > 3 else image.unsqueeze(0)
        return self._placed(image)

    def _transformed(self, image: Any) -> Tensor:
        transform = self.saved.transform
        if transform is None:
            raise HyperparameterError(
                "The posterior file holds no transform, so an image cannot become the model's input. Pass floats that are "
                "that input, or save the file again with save_posterior(..., transform=zoo.ImageTransform(...))."
            )
        return transform(image)

    def _placed(self, value: Any) -> Any:
        return as_input(value, self._example) if isinstance(value, Tensor) else value

    def _classified(self, found: Prediction) -> ClassPrediction:
        is_binary = self.saved.link == "sigmoid"
        largest = found.probs.maximum(1 - found.probs) if is_binary else found.probs.amax(1)
        classes = (found.probs > 0.5).long() if is_binary else found.probs.argmax(1)
        names = self.saved.class_names
        labels = tuple(names[index] for index in classes.tolist()) if names and classes.ndim == 1 else ()
        reject = largest < self.reject_below if self.reject_below is not None else None
        return ClassPrediction(found.probs, found.entropy, found.mutual_information, classes, labels, reject)


def _channels_first(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bytes ``[H, W]`` or ``[…, H, W, C]`` as ``[…, C, H, W]``; anything but bytes stays."""
    if pixels.dtype != np.uint8:
        return pixels
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, -3)
