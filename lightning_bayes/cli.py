"""The command line: ``lightning-bayes fit|validate|test|predict --config DATA+MODEL+METHOD``, a LightningCLI.

A config is a file, a packaged recipe, or a composition such as ``cifar10+lenet+vogn`` (`lightning_bayes.composition`).
``lightning-bayes laplace`` adds a Laplace posterior to a trained checkpoint (`lightning_bayes.command_words`), and
``lightning-bayes report RUN [RUN …]`` compares runs (`lightning_bayes.report`).
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

import lightning_bayes.zoo  # noqa: F401  (configs can then name its classes without the module)
from lightning_bayes.callbacks import DeepEnsembleCallback, EvaluationFigures, PredictionWriter
from lightning_bayes.cli_parser import BayesParser
from lightning_bayes.command_words import KINDS_OF_CHECKPOINT, as_test_under_laplace, with_prediction_writer
from lightning_bayes.config_completion import drop_pretrained, fill_class_count
from lightning_bayes.config_lookup import with_configs
from lightning_bayes.errors import BayesError, ConfigError
from lightning_bayes.metric_table import metric_table

_DESCRIPTION = """Train, validate, test and predict with a posterior over the weights.

  lightning-bayes fit --config digits+lenet+vogn                train; CONFIG is DATA+MODEL+METHOD, a recipe or a file
  lightning-bayes fit --config digits+lenet+vogn --trainer.max_epochs=5 --trainer.callbacks.mc_samples=2
  lightning-bayes test --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
  lightning-bayes laplace --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
                                                                test with a Laplace posterior and save it
  lightning-bayes predict --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
      --data.predict_dir=FOLDER --output=predictions.csv --reject_below=0.8
                                                                predict unlabelled images (.csv, .parquet or .pt)
  lightning-bayes report RUN [RUN ...]                          compare runs on one HTML page
  lightning-bayes list configs|data|models|methods|presets      list what is available
  lightning-bayes fit --trainer.callbacks.help=VOGNCallback     show the arguments of a class
  lightning-bayes --version

--debug prints full error messages and tracebacks."""
_DEBUG = "--debug"


def main() -> None:
    """Run the command line of this process.

    Raises:
        SystemExit: With status 2 if a config does not exist or the arguments do not parse; with status 1 and the message
            for an error of this package or a missing dependency.
    """
    is_debugging = _DEBUG in sys.argv
    try:
        # DDP launches its processes with sys.argv, so the arguments are rewritten there.
        arguments = with_prediction_writer([word for word in sys.argv[1:] if word != _DEBUG])
        sys.argv[1:] = as_test_under_laplace(with_configs(arguments))
    except ConfigError as error:
        print(f"lightning-bayes: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # Lightning 2.6 calls a pytree API that torch 2.15 deprecates; a user of the command line cannot change that.
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)
    try:
        BayesCLI(is_debugging=is_debugging)
    except Exception as error:
        user_error = _user_error(error)
        if user_error is None or is_debugging:
            raise
        raise SystemExit(_message(user_error)) from error  # a traceback would bury the advice in the message


def _message(error: BaseException) -> str:
    """The line to print, without the traceback that torch adds to the message of a data-loading worker's error."""
    kind = type(error)
    message = str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2]
    return f"lightning-bayes: {kind.__name__}: {message}"


def _user_error(error: BaseException | None) -> BaseException | None:
    """The first error in the chain of causes that needs no traceback: one of this package, or a missing dependency."""
    while error is not None and not isinstance(error, (BayesError, ModuleNotFoundError)):
        error = error.__cause__  # jsonargparse wraps the errors of constructors
    return error


def instantiate(config: str, *arguments: str) -> BayesCLI:
    """Set the seed and build the objects of a config without running a subcommand.

    Args:
        config: A value of ``--config``: a file, a recipe or a composition.
        *arguments: Further command-line arguments, without a subcommand.

    Returns:
        The CLI object, with ``trainer``, ``model``, ``datamodule``, and the ``config`` that its ``parser`` can save.

    Example:
        >>> run = instantiate("digits+mlp+vogn", "--trainer.accelerator=cpu", "--trainer.logger=false")
        >>> type(run.model).__name__, run.trainer.max_epochs
        ('BayesClassifier', 40)
    """
    return BayesCLI(with_configs(["--config", config, *arguments]), run=False)


class BayesCLI(LightningCLI):
    """LightningCLI for any module and data module, which saves predictions and figures and prints the run's folder.

    Any LightningCLI can read the configs that it saves.

    Args:
        arguments: The command line; by default the arguments of the process.
        run: Whether to run a subcommand; if False, the command line has no subcommands.
        is_debugging: Whether argument errors are printed in full.
    """

    _new_folder: Path | None = None  # the run's folder, if this run creates it

    def __init__(self, arguments: list[str] | None = None, run: bool = True, is_debugging: bool = False) -> None:
        try:
            super().__init__(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,  # tasks take the optimizer as an argument
                trainer_defaults={"callbacks": [PredictionWriter(), EvaluationFigures(required=False)]},
                save_config_callback=RunConfig if run else None,
                parser_class=partial(BayesParser, is_debugging=is_debugging),  # type: ignore[arg-type]  # Lightning only calls it
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
        """Parse the arguments. Lightning's method would warn if the process has arguments too."""
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # a list or None

    def before_instantiate_classes(self) -> None:
        """Read the number of classes from the data, and skip pretrained weights that a checkpoint will replace."""
        config = self.config.get(str(self.subcommand), self.config)
        fill_class_count(config)
        if self.subcommand not in {None, "fit"}:
            drop_pretrained(config)

    def _ckpt_path(self) -> str | None:
        path = self.config[str(self.subcommand)].get("ckpt_path")
        return None if path is None else str(path)

    def _prepare_run(self) -> None:
        folder = getattr(self.trainer.logger, "log_dir", None)
        self._new_folder = Path(folder) if folder is not None and not Path(folder).exists() else None
        path = self._ckpt_path()
        if path and path not in KINDS_OF_CHECKPOINT and "://" not in path and not Path(path).exists():
            raise ConfigError(
                f"Checkpoint {path} does not exist (working directory: {Path.cwd()}). Pass the path of a file that a fit "
                "has saved."
            )

    before_fit = _prepare_run

    def _remove_empty_folder(self) -> None:
        """Remove the folder of a run that failed before it produced a result."""
        folder = self._new_folder
        if folder is None or not self.trainer.is_global_zero or not folder.is_dir():
            return
        names = [path.name for path in folder.rglob("*") if path.is_file()]
        if all(name.startswith("config") or name == "hparams.yaml" for name in names):
            shutil.rmtree(folder, ignore_errors=True)

    def after_fit(self) -> None:
        """Print the run's folder and the command that tests it."""
        callback, config = self.trainer.checkpoint_callback, RunConfig.path_of(self.trainer)
        if not isinstance(callback, ModelCheckpoint) or config is None:
            return
        checkpoint = callback.best_model_path or callback.last_model_path
        if checkpoint:
            command = ["lightning-bayes", "test", "--config", str(config), "--ckpt_path", checkpoint]
            rank_zero_info(f"The run is in {config.parent}. Test it with\n  {shlex.join(command)}")

    def _prepare_evaluation(self) -> None:
        has_members = any(isinstance(callback, DeepEnsembleCallback) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        if not self._ckpt_path() and not has_members:
            rank_zero_warn(
                f"{self.subcommand} uses the weights that {type(self.model).__name__} was constructed with. Pass "
                "--ckpt_path with the checkpoint of a fit to use trained weights."
            )
        self._resolve_last_checkpoint()
        # Every run has its own folder, and evaluations save no checkpoints.
        warnings.filterwarnings("ignore", "The dirpath has changed from", UserWarning)
        self._prepare_run()
        arguments = self.config_init[str(self.subcommand)]
        if "verbose" in arguments:  # Lightning would print the metrics of all loaders once per loader
            arguments["verbose"] = False

    def _resolve_last_checkpoint(self) -> None:
        """Resolve ``last`` to the newest run's checkpoint. Lightning would search the new run and test untrained weights."""
        callback, ckpt_path = self.trainer.checkpoint_callback, self._ckpt_path()
        has_dirpath = isinstance(callback, ModelCheckpoint) and callback.dirpath is not None
        if ckpt_path not in {"best", "last"} or has_dirpath:
            return
        if ckpt_path == "best":
            raise ConfigError(
                "--ckpt_path=best is known only while the fit runs. Pass --ckpt_path=last, or the path of a checkpoint."
            )
        folder = getattr(self.trainer.logger, "log_dir", None)
        runs = Path(folder).parent if folder is not None else Path.cwd()
        checkpoints = sorted(runs.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
        if not checkpoints:
            raise ConfigError(f"No run in {runs} has a file checkpoints/last.ckpt. Pass the path of a checkpoint.")
        for config in (self.config, self.config_init):
            config[str(self.subcommand)]["ckpt_path"] = str(checkpoints[-1])
        rank_zero_info(f"{self.subcommand} uses {checkpoints[-1]}.")

    @rank_zero_only
    def _print_metrics(self) -> None:
        if self.config[str(self.subcommand)].get("verbose"):
            Console().print(metric_table({key: float(value) for key, value in self.trainer.callback_metrics.items()}))

    before_validate = before_test = before_predict = _prepare_evaluation
    after_validate = after_test = _print_metrics


class RunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's folder; if the name is taken, ``config-1.yaml`` and so on."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose a free file name, and write the config once."""
        folder = trainer.log_dir
        if folder is not None and not self.already_saved:
            self.config_filename = _free_name(Path(folder))
        super().setup(trainer, pl_module, stage)

    @staticmethod
    def path_of(trainer: Trainer) -> Path | None:
        """The path of a trainer's saved config; None if it saves none."""
        folder = trainer.log_dir
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, RunConfig)]  # type: ignore[attr-defined]
        return Path(folder) / callbacks[0].config_filename if callbacks and folder is not None else None


def _free_name(folder: Path) -> str:
    names = ["config.yaml", *(f"config-{number}.yaml" for number in range(1, 10_000))]
    return next(name for name in names if not (folder / name).exists())
