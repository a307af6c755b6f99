"""What data and model must agree on before anything is trained or tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_bayes.errors import DataError


def check_classes(trainer: Any, num_classes: int, class_names: Sequence[str], source: str) -> None:
    """Refuse a model for another number of classes.

    Args:
        trainer: The data module's; None, or a module without ``num_classes``, passes.
        num_classes: Of the data.
        class_names: Of the data, for the message.
        source: What the message calls the data.

    Raises:
        DataError: If the module's ``num_classes`` is another number.
    """
    wanted = getattr(getattr(trainer, "lightning_module", None), "num_classes", num_classes)
    if wanted != num_classes:
        raise DataError(
            f"{source} has {num_classes} classes ({', '.join(class_names)}), but the model has num_classes={wanted}. Pass "
            f"num_classes={num_classes} to the module and its network."
        )
