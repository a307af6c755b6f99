"""Serve a posterior file: images or arrays in, probabilities and their uncertainty out.

    predict = Predictor.load("posterior.safetensors")
    predict("cat.jpg").labels, predict(array).entropy

A predictor can reject predictions whose largest probability is below a threshold (Chow 1970, the optimal rule for calibrated
probabilities), so that a person or a better model can decide.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.likelihood import Categorical, Moments, Observed, OutputLikelihood, Prediction
from lightning_bayes.likelihood.predictions import AnyPrediction
from lightning_bayes.predictive import (
    Exported,
    PosteriorSamples,
    as_input,
    check_threshold,
    evaluation_mode,
    export,
    predictive_samples,
)
from lightning_bayes.predictive.known_outputs import called, kind_of_outputs, known_outputs, predicted

if TYPE_CHECKING:  # the zoo imports torchvision, which tabular models do not need
    from lightning_bayes.zoo import SavedPosterior


class ClassPrediction(NamedTuple):
    """The prediction of a classifier."""

    probs: Tensor  # averaged over weight samples: [B, C]; [B, …] for independent Bernoullis
    entropy: Tensor  # total uncertainty in nats, [B], or [B, …] like the fields below
    mutual_information: Tensor  # epistemic part in nats, [B]
    classes: Tensor  # index of the largest probability, [B]
    labels: tuple[str, ...]  # names of `classes`; empty if the file has no class names
    reject: Tensor | None  # [B], bool; None without a threshold


class ValuePrediction(NamedTuple):
    """The prediction of a regression network."""

    mean: Tensor  # over weight samples, [B, …]
    std: Tensor  # over weight samples, without the observation noise, [B, …]
    noise_std: Tensor | None = None  # of the observation noise, [B, …]; None if the training loss does not tell it
    lower: Tensor | None = None  # ends of the central 90 % interval of the targets
    upper: Tensor | None = None


@final
class Predictor:
    """Predicts with a saved posterior, using the same weight samples in every call.

    Args:
        saved: The contents of a posterior file, from `lightning_bayes.zoo.load`.
        samples: S, the number of weight samples, at least 1.
        seed: Seed of the weight samples.
        reject_below: Reject predictions whose largest probability is smaller; None rejects none. A
            `lightning_bayes.predictive.Rejector` finds a threshold with a guarantee.
        device: Device of the computation and the results.

    Attributes:
        saved: The posterior, its model, its transform and its class names.

    Raises:
        HyperparameterError: If `samples` or `reject_below` is out of range.
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
        drawn = PosteriorSamples(posterior, samples, seed)
        self._known = known_outputs(posterior, saved.likelihood)
        self._draws = predictive_samples(drawn, posterior.linearized, kind_of_outputs(self._known))
        self._example = next(iter(posterior.mean.values()))  # has the device and dtype of the weights

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        allow: str | Sequence[str] = (),
        **options: Any,
    ) -> Predictor:
        """Read a posterior file, or the run that would write it.

        Args:
            path: A file written by `lightning_bayes.zoo.save_posterior`, or its name; see `lightning_bayes.zoo.load`. Or the
                folder of a fit of the command line, such as ``runs/digits_lenet5_vogn/version_0``.
            model: The network; required if the file does not describe how to build it.
            allow: Packages whose code may build the network.
            **options: Arguments of `Predictor`.

        Returns:
            The predictor.
        """
        if Path(path).is_dir():
            from lightning_bayes.cli.finished_run import saved_run

            return cls(saved_run(Path(path)), **options)
        from lightning_bayes.zoo import load

        return cls(load(path, model=model, allow=allow), **options)

    def export(self, path: str | os.PathLike[str], inputs: Tensor | tuple[Tensor, ...] | None = None) -> Exported:
        """Export this predictor as one network that takes the model's input; see `lightning_bayes.export`.

        Args:
            path: The output file, ``.pt2`` or ``.onnx``.
            inputs: An example batch of the model's input, a tuple for several; by default images of the size that the file's
                transform produces.

        Returns:
            The file and the names of its outputs.

        Raises:
            HyperparameterError: If there is neither an example nor a transform.
        """
        saved, transform = self.saved, self.saved.transform
        if inputs is None:
            if transform is None:
                raise HyperparameterError("The posterior file has no transform: pass an example of the model's inputs.")
            inputs = torch.zeros(2, len(transform.mean), transform.image_size, transform.image_size)
        return export(
            self._model,
            self._posterior,
            path,
            tuple(map(self._to_model, inputs)) if isinstance(inputs, tuple) else self._to_model(inputs),
            self.samples,
            link=self._known,
            seed=self.seed,
            temperature=saved.temperature,
        )

    @torch.no_grad()
    def __call__(self, inputs: Any) -> Any:
        """Predict, with one row per example.

        Args:
            inputs: See `prepare`.

        Returns:
            `ClassPrediction` or `ValuePrediction`. If the training loss takes several outputs, one for each, in the
            structure of the model's output.
        """
        batch = self.prepare(inputs)
        call = called(self._model, self._known, batch)
        with evaluation_mode(self._model):
            return predicted(self._model, self._draws, self._known, call, self.saved.temperature, self._converted)

    def _converted(self, prediction: AnyPrediction, kind: OutputLikelihood) -> ClassPrediction | ValuePrediction:
        if isinstance(prediction, Moments):
            return ValuePrediction(prediction.mean, prediction.variance.sqrt())
        if isinstance(prediction, Observed):
            noise, ends = prediction.aleatoric.sqrt(), (prediction.lower, prediction.upper)
            return ValuePrediction(prediction.mean, prediction.epistemic.sqrt(), noise, *ends)
        return self._classify(prediction, kind)

    def prepare(self, inputs: Any) -> Any:
        """Convert images to a batch of the model's input.

        Args:
            inputs: One image or a list of images: paths, PIL images, uint8 arrays of NumPy (``[H, W]``, ``[H, W, C]`` or
                ``[B, H, W, C]``), or uint8 tensors (``[C, H, W]`` or ``[B, C, H, W]``). They require a transform in the
                file. Other inputs, such as floats ``[B, …]``, are passed to the model without a transform. Items of a list
                are concatenated along the batch. A dictionary holds arguments of the model by name; a tuple holds them in
                order, for a model that takes several.

        Returns:
            One batch on the device of the weights; floats are cast to the dtype of the weights.

        Raises:
            ShapeError: If a list is empty.
        """
        if isinstance(inputs, Mapping):
            return {name: self._to_model(value) for name, value in inputs.items()}
        if isinstance(inputs, tuple) and self._known.inputs is not None and self._known.inputs.count > 1:
            return tuple(map(self._to_model, inputs))
        if isinstance(inputs, (list, tuple)):
            if not inputs:
                raise ShapeError("There is nothing to predict: the list of inputs is empty. Pass at least one.")
            return torch.cat([self._prepare_one(image) for image in inputs])
        return self._prepare_one(inputs)

    def _prepare_one(self, image: Any) -> Any:
        if isinstance(image, (str, os.PathLike)):
            from lightning_bayes.zoo.data.images import read_image

            image = read_image(Path(image))
        if isinstance(image, np.ndarray):
            image = torch.from_numpy(np.ascontiguousarray(_channels_first(image)))
        is_pil_image = hasattr(image, "getbands")
        if is_pil_image or (isinstance(image, Tensor) and image.dtype == torch.uint8):
            image = self._transform(image)
            image = image if image.ndim > 3 else image.unsqueeze(0)
        return self._to_model(image)

    def _transform(self, image: Any) -> Tensor:
        transform = self.saved.transform
        if transform is None:
            raise HyperparameterError(
                "The posterior file has no transform, so images cannot be converted to the model's input. Pass floats in "
                "that format, or save the file again with save_posterior(..., transform=zoo.ImageTransform(...))."
            )
        return transform(image)

    def _to_model(self, value: Any) -> Any:
        """Move a tensor to the device and dtype of the weights."""
        return as_input(value, self._example) if isinstance(value, Tensor) else value

    def _classify(self, prediction: Prediction, kind: OutputLikelihood) -> ClassPrediction:
        probs, names = prediction.probs, self.saved.class_names
        if isinstance(kind, Categorical):
            largest, classes = probs.amax(kind.classes), probs.argmax(kind.classes)
        else:
            largest, classes = probs.maximum(1 - probs), (probs > 0.5).long()
        labels = tuple(names[index] for index in classes.tolist()) if names and classes.ndim == 1 else ()
        reject = largest < self.reject_below if self.reject_below is not None else None
        return ClassPrediction(probs, prediction.entropy, prediction.mutual_information, classes, labels, reject)


def _channels_first(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Move the channels of uint8 ``[H, W]`` or ``[…, H, W, C]`` to ``[…, C, H, W]``; other dtypes are unchanged."""
    if pixels.dtype != np.uint8:
        return pixels
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, -3)
