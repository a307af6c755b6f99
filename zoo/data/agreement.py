"""Checks that data and model agree on the classes; hands the transform and the class names from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.errors import DataError
from lightning_bayes.zoo.create import input_transform, known_architecture
from lightning_bayes.zoo.transforms import ImageTransform


def check_classes(trainer: Any, num_classes: int, class_names: Sequence[str], source: str) -> None:
    """Refuse a model for another number of classes.

    Args:
        trainer: The data module's; None, or a module without ``num_classes``, passes.
        num_classes: The number of classes of the data.
        class_names: The class names of the data, for the message.
        source: The name of the data in the message.

    Raises:
        DataError: If the module's ``num_classes`` is another number.
    """
    wanted = getattr(getattr(trainer, "lightning_module", None), "num_classes", num_classes)
    if wanted != num_classes:
        raise DataError(
            f"{source} has {num_classes} classes ({', '.join(class_names)}), but the model has num_classes={wanted}. Pass "
            f"num_classes={num_classes} to the module and its network."
        )


def hand_over(trainer: Any, transform: ImageTransform, class_names: Sequence[str]) -> None:
    """Store the input transform and the class names in the models of a fit, for `save_posterior`.

    A message says if their weights had another transform.

    Args:
        trainer: The data module's; without one nothing happens, as with models that `create_model` has not built.
        transform: That of the data.
        class_names: The class names of the data.
    """
    module = getattr(trainer, "lightning_module", None)
    for model in module.modules() if module is not None else ():
        if known_architecture(model) is None:
            continue
        known = input_transform(model)
        if known not in {None, transform}:
            rank_zero_info(
                f"The weights of {type(model).__name__} were trained through {known}, and this fit trains through "
                f"{transform}, which save_posterior will store."
            )
        vars(model).update(zoo_transform=transform, zoo_class_names=tuple(class_names))
