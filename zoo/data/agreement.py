"""Checks that data and model have the same classes, and passes the transform and class names on to the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.errors import DataError
from lightning_bayes.zoo.create import input_transform, known_architecture
from lightning_bayes.zoo.transforms import ImageTransform


def check_classes(trainer: Any, num_classes: int, class_names: Sequence[str], source: str) -> None:
    """Raise DataError if the trainer's module has a ``num_classes`` that differs from the number of classes of the data."""
    model_classes = getattr(getattr(trainer, "lightning_module", None), "num_classes", num_classes)
    if model_classes != num_classes:
        raise DataError(
            f"{source} has {num_classes} classes ({', '.join(class_names)}), but the model has "
            f"num_classes={model_classes}. Pass num_classes={num_classes} to the module and its network."
        )


def attach_to_models(trainer: Any, transform: ImageTransform, class_names: Sequence[str]) -> None:
    """Attach the input transform and the class names of the data to the `create_model` models of a fit.

    `save_posterior` stores them. A message says if the model's pretrained weights had a different transform. Without a
    trainer, nothing happens.
    """
    module = getattr(trainer, "lightning_module", None)
    for model in module.modules() if module is not None else ():
        if known_architecture(model) is None:
            continue
        previous = input_transform(model)
        if previous not in {None, transform}:
            rank_zero_info(
                f"The weights of {type(model).__name__} were trained with {previous}, but this fit uses {transform}, which "
                "save_posterior will store."
            )
        vars(model).update(zoo_transform=transform, zoo_class_names=tuple(class_names))
