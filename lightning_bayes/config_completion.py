"""Completion of configs: the number of classes of the data, and pretrained weights that a checkpoint replaces."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from jsonargparse import Namespace

from lightning_bayes.errors import ConfigError

_KEY: Final = "num_classes"


def fill_class_count(config: Namespace) -> None:
    """Replace every ``num_classes: null`` of the task and its network, in place.

    The number is the one that stands in the other place, else that of the data: the class method ``count_classes(root)`` of
    the data module, or its attribute ``num_classes``.

    Args:
        config: The config of one subcommand, with ``model`` and ``data``.

    Raises:
        ConfigError: If it is needed and nothing tells it.

    Example:
        >>> network = Namespace(class_path="Net", init_args=Namespace(num_classes=None))
        >>> task = Namespace(class_path="Task", init_args=Namespace(num_classes=7, model=network))
        >>> fill_class_count(Namespace(model=task, data=None))
        >>> network.init_args.num_classes
        7
    """
    places = list(_places(config.get("model")))
    missing = [place for place in places if place[_KEY] is None]
    if not missing:
        return
    given = next((place[_KEY] for place in places if place[_KEY] is not None), None)
    number = given if given is not None else _of_data(config.get("data"))
    if number is None:
        raise ConfigError("Nothing tells the number of classes. Pass --model.num_classes=3, or name data that know it.")
    for place in missing:
        place[_KEY] = number


def drop_pretrained(config: Namespace) -> None:
    """Read no pretrained weights where those of a checkpoint follow: the file may be gone, and a download takes minutes.

    Args:
        config: The config of a subcommand that evaluates.

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


def _places(node: Any) -> Iterator[Namespace]:
    """The arguments of the task, then those of its network."""
    arguments = node.get("init_args") if isinstance(node, Namespace) else None
    if isinstance(arguments, Namespace):
        if _KEY in arguments:
            yield arguments
        yield from _places(arguments.get("model"))


def _of_data(data: Any) -> int | None:
    if not isinstance(data, Namespace):
        return None
    module, _, name = data.class_path.rpartition(".")
    found = getattr(import_module(module), name)
    count, known = getattr(found, "count_classes", None), getattr(found, _KEY, None)
    if count is not None:
        number: int = count(data.init_args.root)
        return number
    return known if isinstance(known, int) else None
