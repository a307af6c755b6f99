"""The command line: ``lightning-bayes fit|validate|test|predict --config DATA+MODEL+METHOD``, a LightningCLI.

A config is a file, the name of a recipe of this package, or a composition such as ``cifar10+lenet+vogn``; see
`lightning_bayes.composition`. ``lightning-bayes report RUN [RUN …]`` compares the results of runs; see
`lightning_bayes.report`. ``lightning-bayes laplace`` gives a trained checkpoint a posterior; see
`lightning_bayes.laplace_command`.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import warnings
from functools import partial
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from rich.console import Console

import lightning_bayes.zoo  # noqa: F401  (imported classes can be named without their module)
from lightning_bayes.callbacks import DeepEnsembleCallback, EvaluationFigures, PredictionWriter
from lightning_bayes.cli_parser import BayesParser
from lightning_bayes.config_completion import drop_pretrained, fill_class_count
from lightning_bayes.config_lookup import with_configs
from lightning_bayes.errors import BayesError, ConfigError
from lightning_bayes.laplace_command import KINDS_OF_CHECKPOINT, as_test_under_laplace
from lightning_bayes.metric_table import metric_table
from lightning_bayes.predict_command import with_prediction_writer

_DESCRIPTION = """Train, validate, test and predict with a posterior over the weights.

  lightning-bayes fit --config digits+lenet+vogn                train; CONFIG is DATA+MODEL+METHOD, a recipe or a file
  lightning-bayes fit --config digits+lenet+vogn --trainer.max_epochs=5 --trainer.callbacks.mc_samples=2
  lightning-bayes test --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
  lightning-bayes laplace --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
                                                                test under a Laplace approximation, and save it
  lightning-bayes predict --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
      --data.predict_dir=FOLDER --output=predictions.csv --reject_below=0.8
                                                                predict images without labels (.csv, .parquet or .pt)
  lightning-bayes report RUN [RUN ...]                          compare runs on one HTML page
  lightning-bayes list configs|data|models|methods|presets      what there is
  lightning-bayes fit --trainer.callbacks.help=VOGNCallback     the arguments of a class
  lightning-bayes --version

--debug prints whole messages and tracebacks."""
_DEBUG = "--debug"


def main() -> None:
    """Run the command line of this process.

    Raises:
        SystemExit: With status 2 for a config that does not exist and for arguments that do not parse, and with status 1
            and the message for an error of this package and for a package that is not installed.
    """
    is_debugging = _DEBUG in sys.argv
    try:
        # Not args=...: DDP starts its processes from sys.argv.
        words = with_prediction_writer([word for word in sys.argv[1:] if word != _DEBUG])
        sys.argv[1:] = as_test_under_laplace(with_configs(words))
    except ConfigError as error:
        print(f"lightning-bayes: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # Lightning 2.6 uses torch's pytrees in a way that torch 2.15 deprecates; users of a command line cannot change that.
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)
    try:
        BayesCLI(is_debugging=is_debugging)
    except Exception as error:
        own = _own_error(error)
        if own is None or is_debugging:
            raise
        raise SystemExit(_message(own)) from error  # it says how to go on; a traceback would hide it


def _message(error: BaseException) -> str:
    """The line to print. Torch puts the whole traceback into the message of an error from a data-loading process."""
    kind = type(error)
    message = str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2]
    return f"lightning-bayes: {kind.__name__}: {message}"


def _own_error(error: BaseException | None) -> BaseException | None:
    """The error behind another one that says enough: this package's, or that of a package that is not there.

    jsonargparse wraps the errors of constructors.

    Args:
        error: The error that was caught.

    Returns:
        The first such error along its causes; None if there is none.
    """
    while error is not None and not isinstance(error, (BayesError, ModuleNotFoundError)):
        error = error.__cause__
    return error


def instantiate(config: str, *arguments: str) -> BayesCLI:
    """Build the objects of a config, with its seed set, and run nothing.

    Args:
        config: As after ``--config``.
        *arguments: More of the command line, without a subcommand.

    Returns:
        An object with ``trainer``, ``model`` and ``datamodule``, and the ``config`` that its ``parser`` can save.

    Example:
        >>> run = instantiate("digits+mlp+vogn", "--trainer.accelerator=cpu", "--trainer.logger=false")
        >>> type(run.model).__name__, run.trainer.max_epochs
        ('BayesClassifier', 40)
    """
    return BayesCLI(with_configs(["--config", config, *arguments]), run=False)


class BayesCLI(LightningCLI):
    """LightningCLI for any module and data module, which writes predictions and names the folder of a run.

    Any other LightningCLI reads the configs that it saves.

    Args:
        arguments: The command line; None takes that of this process.
        run: Whether to run the subcommand. If not, there are no subcommands.
        is_debugging: Whether messages about arguments are whole.
    """

    _new_folder: Path | None = None  # of the run, if it was not there before

    def __init__(self, arguments: list[str] | None = None, run: bool = True, is_debugging: bool = False) -> None:
        try:
            super().__init__(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,  # a task takes its optimizer as an argument
                trainer_defaults={"callbacks": [PredictionWriter(), EvaluationFigures(required=False)]},
                save_config_callback=RunConfig if run else None,
                parser_class=partial(BayesParser, is_debugging=is_debugging),  # type: ignore[arg-type]  # it is only called
                parser_kwargs={
                    "prog": "lightning-bayes",
                    "description": _DESCRIPTION,
                    "formatter_class": argparse.RawDescriptionHelpFormatter,
                },
                args=arguments,
                run=run,
            )
        except Exception:
            self._remove_empty_folder()
            raise

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, or those of the process. Lightning's own method warns where a process has both.

        Args:
            parser: The parser.
            args: The arguments.
        """
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # a list or None, see __init__

    def before_instantiate_classes(self) -> None:
        """Let the data tell the number of classes, and an evaluation's checkpoint replace pretrained weights."""
        config = self.config.get(str(self.subcommand), self.config)
        fill_class_count(config)
        if self.subcommand not in {None, "fit"}:
            drop_pretrained(config)

    def _before(self) -> None:
        folder = getattr(self.trainer.logger, "log_dir", None)
        self._new_folder = Path(folder) if folder is not None and not Path(folder).exists() else None
        self._require_checkpoint()

    def _remove_empty_folder(self) -> None:
        """Remove the folder of a run that failed before it had a result."""
        folder = self._new_folder
        if folder is None or not self.trainer.is_global_zero or not folder.is_dir():
            return
        names = [path.name for path in folder.rglob("*") if path.is_file()]
        if all(name.startswith("config") or name == "hparams.yaml" for name in names):
            shutil.rmtree(folder, ignore_errors=True)

    def _require_checkpoint(self) -> None:
        path = self.config[str(self.subcommand)].get("ckpt_path")
        if path and path not in KINDS_OF_CHECKPOINT and "://" not in str(path) and not Path(path).exists():
            raise ConfigError(
                f"There is no checkpoint {path} below {Path.cwd()}. Pass the path of a file that a fit saved."
            )

    before_fit = _before

    def after_fit(self) -> None:
        """Print the folder of the run and the command that tests it."""
        saved = self.trainer.checkpoint_callback
        checkpoint = (saved.best_model_path or saved.last_model_path) if isinstance(saved, ModelCheckpoint) else ""
        config = RunConfig.path_of(self.trainer)
        if checkpoint and config is not None:
            command = ["lightning-bayes", "test", "--config", str(config), "--ckpt_path", checkpoint]
            rank_zero_info(f"The run is in {config.parent}. Test it with\n  {shlex.join(command)}")

    def _before_evaluation(self) -> None:
        has_members = any(isinstance(callback, DeepEnsembleCallback) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        if not self.config[str(self.subcommand)].get("ckpt_path") and not has_members:
            rank_zero_warn(
                f"{self.subcommand} uses the weights that {type(self.model).__name__} was built with. Pass --ckpt_path "
                "with the checkpoint of a fit to use trained ones."
            )
        self._find_last()
        # Every run has its own folder, and evaluations save no checkpoints.
        warnings.filterwarnings("ignore", "The dirpath has changed from", UserWarning)
        self._before()
        arguments = self.config_init[str(self.subcommand)]
        if "verbose" in arguments:  # Lightning would print the metrics of all loaders under each of them
            arguments["verbose"] = False

    def _find_last(self) -> None:
        """``last`` is the newest run's: Lightning would look in this run's new folder, and test untrained weights."""
        saved, folder = self.trainer.checkpoint_callback, getattr(self.trainer.logger, "log_dir", None)
        has_own_place = isinstance(saved, ModelCheckpoint) and saved.dirpath is not None
        asked = self.config[str(self.subcommand)].get("ckpt_path")
        if asked not in {"best", "last"} or has_own_place:
            return
        if asked == "best":
            raise ConfigError("Only the fit itself knows its best checkpoint. Pass --ckpt_path=last, or a file's path.")
        runs = Path(folder).parent if folder is not None else Path.cwd()
        found = sorted(runs.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ConfigError(f"No run in {runs} has a last checkpoint. Pass --ckpt_path with the path of a file.")
        for values in (self.config, self.config_init):
            values[str(self.subcommand)]["ckpt_path"] = str(found[-1])
        rank_zero_info(f"{self.subcommand} uses {found[-1]}.")

    @rank_zero_only
    def _print_metrics(self) -> None:
        if self.config[str(self.subcommand)].get("verbose"):
            Console().print(metric_table({key: float(value) for key, value in self.trainer.callback_metrics.items()}))

    before_validate = before_test = before_predict = _before_evaluation
    after_validate = after_test = _print_metrics


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
        """The file of a trainer's config.

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
