"""Complete a config: fill in the number of classes, and drop pretrained weights that a checkpoint replaces."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from jsonargparse import Namespace

from lightning_bayes.errors import ConfigError

_KEY: Final = "num_classes"


def fill_class_count(config: Namespace) -> None:
    """Fill in ``num_classes: null`` of the task and its network, in place.

    If only one of the two is null, it gets the value of the other. If both are null, the number comes from the data module:
    its class method ``count_classes(root)``, or its attribute ``num_classes``.

    Args:
        config: The config of one subcommand, with ``model`` and ``data``.

    Raises:
        ConfigError: If neither the model nor the data defines the number.

    Example:
        >>> network = Namespace(class_path="Net", init_args=Namespace(num_classes=None))
        >>> task = Namespace(class_path="Task", init_args=Namespace(num_classes=7, model=network))
        >>> fill_class_count(Namespace(model=task, data=None))
        >>> network.init_args.num_classes
        7
    """
    owners = list(_owners_of_class_count(config.get("model")))
    missing = [arguments for arguments in owners if arguments[_KEY] is None]
    if not missing:
        return
    counts = [arguments[_KEY] for arguments in owners if arguments[_KEY] is not None]
    count = counts[0] if counts else _class_count_of_data(config.get("data"))
    if count is None:
        raise ConfigError(
            "The number of classes is unknown. Pass --model.num_classes=3, or choose a data module that defines num_classes."
        )
    for arguments in missing:
        arguments[_KEY] = count


def drop_pretrained(config: Namespace) -> None:
    """Skip pretrained weights that a checkpoint will replace: their file may be gone, and a download takes minutes.

    Args:
        config: The config of a subcommand other than ``fit``.

    Example:
        >>> network = Namespace(class_path="lightning_bayes.zoo.create_model", init_args=Namespace(pretrained="gone.pth"))
        >>> task = Namespace(class_path="Task", init_args=Namespace(model=network))
        >>> drop_pretrained(Namespace(model=task, ckpt_path="last.ckpt"))
        >>> network.init_args.pretrained is None
        True
    """
    network = config.get("model.init_args.model")
    is_ours = isinstance(network, Namespace) and str(network.get("class_path")).startswith("lightning_bayes.")
    if config.get("ckpt_path") and is_ours and network.get("init_args.pretrained") is not None:
        network["init_args"]["pretrained"] = None


def _owners_of_class_count(node: Any) -> Iterator[Namespace]:
    """The arguments of the task, then of its network, if they include ``num_classes``."""
    arguments = node.get("init_args") if isinstance(node, Namespace) else None
    if isinstance(arguments, Namespace):
        if _KEY in arguments:
            yield arguments
        yield from _owners_of_class_count(arguments.get("model"))


def _class_count_of_data(data: Any) -> int | None:
    if not isinstance(data, Namespace):
        return None
    module_name, _, class_name = data.class_path.rpartition(".")
    data_class = getattr(import_module(module_name), class_name)
    if hasattr(data_class, "count_classes"):
        return int(data_class.count_classes(data.init_args.root))
    count = getattr(data_class, _KEY, None)
    return count if isinstance(count, int) else None
