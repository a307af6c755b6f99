"""The command line: ``lightning-bayes fit|validate|test|predict --config NAME``, a LightningCLI for any model and data.

``lightning-bayes report RUN [RUN …]`` compares what such runs have left; see `report`.

A config that is no file is looked up among those of this package, so the experiments run from any directory.
"""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from rich.console import Console
from rich.table import Table

import lightning_bayes.zoo  # noqa: F401  (imported classes can be named without their module)
from lightning_bayes import report
from lightning_bayes.callbacks import DeepEnsembleCallback, EvaluationFigures, PredictionWriter
from lightning_bayes.errors import BayesError

_CONFIG_OPTIONS = ("-c", "--config")
_SINGLE_SHIFT = re.compile(r"shift(_mean)?/(?!all/)[^/]+/\d+/")
WAYS = ("Value", "Mean", "Scaled")  # as predicted; at the posterior mean; by the fitted temperature
_DESCRIPTION = """Train, validate, test and predict with a posterior over the weights.
CONFIG is a YAML file or the name of a packaged one: {names}.
Every argument of a class can be shown, such as those of a callback with fit --trainer.callbacks.help=VOGNCallback,
and overridden, such as with --trainer.max_epochs=5 or --trainer.callbacks.mc_samples=2.
lightning-bayes report RUN [RUN ...] writes one HTML page that compares runs."""


def main() -> None:
    """Run the command line of this process.

    Raises:
        SystemExit: With status 2 for a config that does not exist and for arguments that do not parse, and with status 1
            and the message for an error of this package.
    """
    if sys.argv[1:2] == ["report"]:
        _report(sys.argv[2:])
        return
    try:
        sys.argv[1:] = with_packaged_configs(sys.argv[1:])  # not args=...: processes of DDP are started from sys.argv
    except FileNotFoundError as error:
        print(f"lightning-bayes: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # Lightning 2.6 asks torch's pytrees in a way that torch 2.15 deprecates; nobody at a command line can change that.
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)
    try:
        BayesCLI()
    except Exception as error:
        own = _own_error(error)
        if own is None:
            raise
        raise SystemExit(_told(own)) from error  # it says what to do; no traceback


def _report(arguments: list[str]) -> None:
    try:
        report.main(arguments)
    except BayesError as error:
        raise SystemExit(_told(error)) from error


def _told(error: BayesError) -> str:
    """What to print; of an error in a process that loads data, torch makes its whole traceback the message."""
    kind = type(error)
    message = str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2]
    return f"lightning-bayes: {kind.__name__}: {message}"


def _own_error(error: BaseException | None) -> BayesError | None:
    """The error of this package behind another one: jsonargparse turns what a constructor raises into errors of its own."""
    while error is not None and not isinstance(error, BayesError):
        error = error.__cause__
    return error


def packaged_configs() -> dict[str, Path]:
    """The configs that come with this package.

    Returns:
        Their files by name, such as ``digits_lenet_vogn.yaml``, in alphabetical order.
    """
    folder = Path(str(resources.files("lightning_bayes.configs")))
    return {path.name: path for path in sorted(folder.glob("*.yaml"))}


def find_config(name: str) -> str:
    """Find a config: a file first, else a packaged one.

    Args:
        name: A path, or the name of a packaged config with or without ``.yaml``. YAML text and URLs stay as they are.

    Returns:
        The path.

    Raises:
        FileNotFoundError: If there is neither; lists the packaged ones.

    Example:
        >>> Path(find_config("digits_lenet_vogn")).name
        'digits_lenet_vogn.yaml'
    """
    if Path(name).is_file() or "://" in name or "{" in name or "\n" in name:
        return name
    packaged = packaged_configs()
    for candidate in (name, f"{name}.yaml"):
        if candidate in packaged:
            return str(packaged[candidate])
    raise FileNotFoundError(
        f"there is no config {name}, neither as a file below {Path.cwd()} nor in this package, which has "
        f"{', '.join(packaged)}."
    )


def with_packaged_configs(arguments: list[str]) -> list[str]:
    """Replace the names of packaged configs by their paths.

    Args:
        arguments: Of the command line.

    Returns:
        The arguments, where what follows ``--config`` or ``-c`` is a path.
    """
    return list(_resolved(iter(arguments)))


def _resolved(arguments: Iterator[str]) -> Iterator[str]:
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option in _CONFIG_OPTIONS and equals:
            yield f"{option}={find_config(value)}"
        else:
            yield argument
            if argument in _CONFIG_OPTIONS:
                yield from map(find_config, _next(arguments))


def _next(arguments: Iterator[str]) -> list[str]:
    value = next(arguments, None)
    return [] if value is None else [value]  # without one, the parser complains


def instantiate(config: str, *arguments: str) -> BayesCLI:
    """Build what a config describes, with its seed set, and run nothing.

    Args:
        config: As after ``--config``.
        *arguments: More of the command line, without a subcommand.

    Returns:
        An object with ``trainer``, ``model`` and ``datamodule``, and the ``config`` that its ``parser`` can save.

    Example:
        >>> run = instantiate("digits_mlp_vogn", "--trainer.accelerator=cpu", "--trainer.logger=false")
        >>> type(run.model).__name__, run.trainer.max_epochs
        ('BayesClassifier', 40)
    """
    return BayesCLI(with_packaged_configs(["--config", config, *arguments]), run=False)


class BayesCLI(LightningCLI):
    """LightningCLI for any module and data module, which writes predictions and says where a run lies.

    Config files hold nothing that another LightningCLI would not read.

    Args:
        arguments: The command line; None takes the one of this process.
        run: Whether to run the subcommand. If not, there are no subcommands.
    """

    def __init__(self, arguments: list[str] | None = None, run: bool = True) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,  # a task takes its optimizer as an argument
            trainer_defaults={"callbacks": [PredictionWriter(), EvaluationFigures(required=False)]},
            save_config_callback=RunConfig if run else None,
            parser_kwargs={
                "prog": "lightning-bayes",
                "description": _DESCRIPTION.format(names=", ".join(packaged_configs())),
            },
            args=arguments,
            run=run,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, or those of the process; Lightning's method minds that a process has both.

        Args:
            parser: The parser.
            args: The arguments.
        """
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # a list or None, see __init__

    def after_fit(self) -> None:
        """Say where the checkpoint is and how to go on."""
        saved = self.trainer.checkpoint_callback
        checkpoint = (saved.best_model_path or saved.last_model_path) if isinstance(saved, ModelCheckpoint) else ""
        config = RunConfig.path_of(self.trainer)
        if checkpoint and config is not None:
            command = ["lightning-bayes", "test", "--config", str(config), "--ckpt_path", checkpoint]
            rank_zero_info(f"The run is in {config.parent}. Test it with\n  {shlex.join(command)}")

    def before_validate(self) -> None:
        """Prepare an evaluation."""
        self._before_evaluation()

    def before_test(self) -> None:
        """Prepare an evaluation."""
        self._before_evaluation()

    def before_predict(self) -> None:
        """Prepare an evaluation."""
        self._before_evaluation()

    def after_validate(self) -> None:
        """Print the metrics."""
        self._print_metrics()

    def after_test(self) -> None:
        """Print the metrics."""
        self._print_metrics()

    def _before_evaluation(self) -> None:
        has_members = any(isinstance(callback, DeepEnsembleCallback) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        if not self._get(self.config, "ckpt_path") and not has_members:
            rank_zero_warn(
                f"{self.subcommand} uses the weights that {type(self.model).__name__} was built with. Pass --ckpt_path "
                "with the checkpoint that fit has written to use trained ones."
            )
        # Every run has a folder of its own; where an evaluation would save checkpoints does not matter.
        warnings.filterwarnings("ignore", "The dirpath has changed from", UserWarning)
        arguments = self.config_init[str(self.subcommand)]
        if "verbose" in arguments:  # Lightning would repeat what belongs to all loaders under each of them
            arguments["verbose"] = False

    @rank_zero_only
    def _print_metrics(self) -> None:
        if self._get(self.config, "verbose"):
            rows = pivoted({name: float(value) for name, value in self.trainer.callback_metrics.items()})
            columns = [column for column in WAYS if any(column in values for values in rows.values())]
            table = Table("Metric", *columns)
            for name, values in sorted(rows.items()):
                table.add_row(name, *(f"{values[way]:.4f}" if way in values else "" for way in columns))
            Console().print(table)


def pivoted(metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    """Put what a test has measured of one thing in several ways beside each other, for a table that people read.

    Of the many values under shift only the means over its kinds stay; loggers have them all.

    Args:
        metrics: Values by the keys of a test.

    Returns:
        For each key without ``_mean`` and ``post/`` its values by a name of `WAYS`.

    Example:
        >>> pivoted({"test/cls/Acc": 0.9, "test_mean/cls/Acc": 0.8, "test/post/cls/Acc": 0.7, "shift/fog/1/cls/Acc": 0.6})
        {'test/cls/Acc': {'Value': 0.9, 'Mean': 0.8, 'Scaled': 0.7}}
    """
    rows: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if _SINGLE_SHIFT.match(name):
            continue
        room, slash, rest = name.partition("/")
        if room.endswith("_mean"):
            key, way = room.removesuffix("_mean") + slash + rest, "Mean"
        elif rest.startswith("post/"):
            key, way = room + slash + rest.removeprefix("post/"), "Scaled"
        else:
            key, way = name, "Value"
        rows.setdefault(key, {})[way] = value
    return rows


class RunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the folder of the run, under a free name where one is there already."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the config once.

        Args:
            trainer: The trainer.
            pl_module: The module.
            stage: The stage that starts.
        """
        folder = trainer.log_dir
        if folder is not None and not self.already_saved:
            self.config_filename = _free_name(Path(folder))
        super().setup(trainer, pl_module, stage)

    @staticmethod
    def path_of(trainer: Trainer) -> Path | None:
        """Where a trainer's config was written.

        Args:
            trainer: The trainer.

        Returns:
            The file; None if there is none.
        """
        folder = trainer.log_dir
        written = [callback for callback in trainer.callbacks if isinstance(callback, RunConfig)]  # type: ignore[attr-defined]
        return Path(folder) / written[0].config_filename if written and folder is not None else None


def _free_name(folder: Path) -> str:
    names = ["config.yaml", *(f"config-{number}.yaml" for number in range(1, 10_000))]
    return next(name for name in names if not (folder / name).exists())
