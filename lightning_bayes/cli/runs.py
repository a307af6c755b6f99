"""What the command line reads from runs and configs: the last run, the number of classes, the table of a test's metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from jsonargparse import Namespace
from lightning_utilities.core.rank_zero import rank_zero_info
from rich.table import Table

from lightning_bayes.cli.composition import CONFIG_OPTIONS, split_options
from lightning_bayes.errors import ConfigError

_KEY: Final = "num_classes"
_PRETRAINED: Final = {
    "lightning_bayes": ("pretrained", None),
    "timm": ("pretrained", False),
    "torchvision": ("weights", None),
}
_SINGLE_SHIFT: Final = re.compile(r"shift(_mean)?/(?!all/)[^/]+/\d+/")
_EVALUATIONS: Final = ("Value", "Mean")  # under the posterior; at its mean


def words_of_last_run(words: Sequence[str], arguments: Namespace) -> list[str] | None:
    """The command line with the newest run's checkpoint and config for ``--ckpt_path=last``; None if there is no run."""
    # Lightning would search the new run, and a fit would start anew.
    if arguments.ckpt_path == "best":
        raise ConfigError(
            "--ckpt_path=best is known only while the fit runs. Pass --ckpt_path=last, or the path of a checkpoint."
        )
    runs = _folder_of_runs(arguments.trainer)
    checkpoints = sorted(runs.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    if not checkpoints:
        return None
    config = checkpoints[-1].parents[1] / "config.yaml"
    settings = f" with the settings in {config}" if config.is_file() else ""
    rank_zero_info(f"--ckpt_path=last is {checkpoints[-1]}{settings}.")
    pairs = list(split_options(words, [*CONFIG_OPTIONS, "--ckpt_path"]))
    if config.is_file():  # it takes the place of named configs; files that follow them still override it
        pairs = [(option, value) for option, value in pairs if option not in CONFIG_OPTIONS or Path(value).is_file()]
        pairs.insert(1, ("--config", str(config)))
    values = {"--ckpt_path": str(checkpoints[-1])}
    return [f"{option}={values.get(option, value)}" if option else value for option, value in pairs]


def _folder_of_runs(trainer: Namespace) -> Path:
    """The folder in which the trainer's logger numbers its runs."""
    logger = trainer.logger[0] if isinstance(trainer.logger, list) else trainer.logger
    given = logger.get("init_args") or {} if isinstance(logger, Namespace) else {}
    root = given.get("save_dir") or trainer.get("default_root_dir") or "."
    return Path(root, given.get("name") or "lightning_logs")


def has_checkpoint_folder(arguments: Namespace) -> bool:
    """Whether a `ModelCheckpoint` has a folder of its own, in which Lightning finds the last checkpoint."""
    callbacks = [entry for entry in arguments.get("trainer.callbacks") or [] if isinstance(entry, Namespace)]
    return any(entry.class_path.endswith("ModelCheckpoint") and entry.get("init_args.dirpath") for entry in callbacks)


def fill_class_count(config: Namespace) -> None:
    """Fill in ``num_classes: null`` of the task and its network: from the other of the two, or else from the data module."""
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


def drop_pretrained(node: Any) -> None:
    """Skip the pretrained weights of every network in a config: a checkpoint replaces them, and their file may be gone."""
    parts = vars(node) if isinstance(node, Namespace) else node
    if not isinstance(parts, Mapping) or "class_path" not in parts:
        return
    given = parts.get("init_args") or {}
    arguments: Any = vars(given) if isinstance(given, Namespace) else given
    name, without = _PRETRAINED.get(str(parts["class_path"]).partition(".")[0], ("", None))
    if name in arguments:
        arguments[name] = without
    for value in arguments.values():
        drop_pretrained(value)


def metric_table(metrics: Mapping[str, float]) -> Table:
    """One row per metric and one column per evaluation that has a value, without the metrics of single corruptions."""
    rows: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if not _SINGLE_SHIFT.match(name):
            mean = name.replace("_mean/", "/", 1)
            rows.setdefault(mean, {})["Mean" if mean != name else "Value"] = value
    columns = [evaluation for evaluation in _EVALUATIONS if any(evaluation in values for values in rows.values())]
    table = Table("Metric", *columns)
    for name, values in sorted(rows.items()):
        table.add_row(name, *(f"{values[evaluation]:.4f}" if evaluation in values else "" for evaluation in columns))
    return table
