"""``lightning-bayes fit|validate|test|predict --config DATA+MODEL+METHOD``, a LightningCLI.

It adds names for configs (`composition`), ``laplace``, which is a test with a `LaplaceCallback`, the options ``--output``
and ``--reject_below`` of ``predict``, and ``--ckpt_path=last``, which stands for the newest run and its config.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from rich.console import Console

import lightning_bayes.zoo  # noqa: F401  (configs can then name its classes without the module)
from lightning_bayes.callbacks import DeepEnsembleCallback, EvaluationFigures, PredictionWriter
from lightning_bayes.callbacks.trainer.neighbours import callbacks_of
from lightning_bayes.cli.composition import CONFIG_OPTIONS, split_options
from lightning_bayes.cli.parser import BayesParser, NamedConfigs
from lightning_bayes.cli.runs import (
    drop_pretrained,
    fill_class_count,
    has_checkpoint_folder,
    metric_table,
    words_of_last_run,
)
from lightning_bayes.errors import ConfigError
from lightning_bayes.report.runs import changed_settings

_KINDS_OF_CHECKPOINT: Final = ("best", "last", "hpc")  # keywords of Lightning, not paths


def run(words: Sequence[str], is_debugging: bool = False) -> None:
    """Run a subcommand with its arguments."""
    # Lightning 2.6 calls a pytree API that torch 2.15 deprecates; a user of the command line cannot change that.
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)
    BayesCLI(_translated(words), is_debugging=is_debugging)


def _translated(words: Sequence[str]) -> list[str]:
    """Arguments of LightningCLI: ``laplace`` and two options of ``predict`` become callbacks."""
    command = "".join(words[:1])
    if command == "predict":
        return _with_writer(words)
    return _as_test(words) if command == "laplace" else list(words)


def _as_test(words: Sequence[str]) -> list[str]:
    """A test with a `LaplaceCallback` after the last config, so that later options set the callback's arguments."""
    words = ["test", *words[1:]]
    if {"-h", "--help"} & set(words):
        return words
    checkpoint = dict(split_options(words, ["--ckpt_path"])).get("--ckpt_path")
    if not checkpoint or checkpoint in _KINDS_OF_CHECKPOINT:
        raise ConfigError(
            "laplace needs a trained checkpoint and saves its posterior next to it. Pass --ckpt_path with the path of the "
            "checkpoint of a fit."
        )
    saved = Path(checkpoint).with_name(f"{Path(checkpoint).stem}-laplace{Path(checkpoint).suffix}")
    ends = [i + (1 if "=" in word else 2) for i, word in enumerate(words) if word.partition("=")[0] in CONFIG_OPTIONS]
    callback = ["--trainer.callbacks+=lightning_bayes.LaplaceCallback", f"--trainer.callbacks.save_to={saved}"]
    return [*words[: max(ends, default=1)], *callback, *words[max(ends, default=1) :]]


def _with_writer(words: Sequence[str]) -> list[str]:
    """A prediction with a `PredictionWriter` at the end, in the place of ``--output`` and ``--reject_below``."""
    others, settings = [], []
    for option, value in split_options(words, ["--output", "--reject_below"]):
        if option and not value:
            raise ConfigError(f"{option} has no value. Pass --output=FILE or --reject_below=PROBABILITY.")
        if option == "--output":
            settings += [f"dirpath={Path(value).parent}", f"filename={Path(value).name}"]
        elif option:
            settings += [f"reject_below={value}"]
        else:
            others.append(value)
    callback = ["--trainer.callbacks+=lightning_bayes.callbacks.PredictionWriter"] if settings else []
    return [*others, *callback, *(f"--trainer.callbacks.{setting}" for setting in settings)]


def instantiate(config: str, *arguments: str) -> BayesCLI:
    """Set the seed and build trainer, model and datamodule of a config without running a subcommand."""
    return BayesCLI(["--config", config, *arguments], run=False)


class BayesCLI(LightningCLI):
    """LightningCLI for any module and data module, which saves predictions and figures and prints the run's folder.

    Any LightningCLI can read the configs that it saves.

    Args:
        arguments: The command line; by default the arguments of the process.
        run: Whether to run a subcommand; if False, the command line has no subcommands.
        is_debugging: Whether argument errors are printed in full.
    """

    _new_folder: Path | None = None  # the run's folder, if this run creates it
    trainer: Trainer

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
                    "description": "Train, validate, test and predict with a posterior over the weights.",
                },
                args=arguments,
                run=run,
            )
        except BaseException:  # Ctrl-C arrives as SystemExit
            self._remove_empty_folder()
            if self._new_folder is not None and self._new_folder.is_dir():
                self._say_how_to_go_on("fit")
            raise

    def init_parser(self, **options: Any) -> LightningArgumentParser:
        """A parser whose ``--config`` takes names."""
        parser = self.parser_class(**options)
        parser.add_argument(*CONFIG_OPTIONS, action=NamedConfigs, help="DATA+MODEL+METHOD, a recipe, or a YAML file")
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; those of a run that ``--ckpt_path=last`` stands for come from its own config."""
        words = sys.argv[1:] if args is None else list(args)
        self.config = parser.parse_args(words)
        arguments = self.config.get(str(self.config.get("subcommand")))
        if arguments is None or arguments.get("ckpt_path") not in {"best", "last"} or has_checkpoint_folder(arguments):
            return
        words_of_run = words_of_last_run(words, arguments)
        if words_of_run is not None:
            self.config = parser.parse_args(words_of_run)
        elif self.config.subcommand == "fit":
            arguments["ckpt_path"] = None
            rank_zero_warn("--ckpt_path=last found no run to continue, so a new one starts.")
        else:
            raise ConfigError("--ckpt_path=last found no run with a file checkpoints/last.ckpt. Pass the path of one.")

    def before_instantiate_classes(self) -> None:
        """Read the number of classes from the data, and skip pretrained weights that a checkpoint will replace."""
        config = self.config.get(str(self.subcommand), self.config)
        fill_class_count(config)
        if self.subcommand is not None and config.get("ckpt_path"):
            drop_pretrained(config.get("model"))

    def _ckpt_path(self) -> str | None:
        path = self.config[str(self.subcommand)].get("ckpt_path")
        return None if path is None else str(path)

    def _prepare_run(self) -> None:
        warnings.filterwarnings("ignore", "The dirpath has changed from", UserWarning)  # every run has its own folder
        folder = getattr(self.trainer.logger, "log_dir", None)
        self._new_folder = Path(folder) if folder is not None and not Path(folder).exists() else None
        path = self._ckpt_path()
        if path and path not in _KINDS_OF_CHECKPOINT and "://" not in path and not Path(path).exists():
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
        self._say_how_to_go_on("test")

    def _say_how_to_go_on(self, subcommand: str) -> None:
        """Print the run's folder, and the command that tests or continues it."""
        callback, config = self.trainer.checkpoint_callback, RunConfig.path_of(self.trainer)
        if not isinstance(callback, ModelCheckpoint) or config is None or self.subcommand != "fit":
            return
        is_test = subcommand == "test"
        checkpoint = callback.best_model_path or callback.last_model_path
        if checkpoint:
            command = ["lightning-bayes", subcommand, "--config", str(config), "--ckpt_path", checkpoint]
            verb = "Test" if is_test else "It was stopped. Continue"
            rank_zero_info(f"The run is in {config.parent}. {verb} it with\n  {shlex.join(command)}")

    def _prepare_evaluation(self) -> None:
        has_members = any(callback.members for callback in callbacks_of(self.trainer, DeepEnsembleCallback))
        path = self._ckpt_path()
        if not path and not has_members:
            rank_zero_warn(
                f"{self.subcommand} uses the weights that {type(self.model).__name__} was constructed with. Pass "
                "--ckpt_path with the checkpoint of a fit to use trained weights."
            )
        self._prepare_run()
        self._warn_of_other_settings(Path(path or "").parents[1:2])
        arguments = self.config_init[str(self.subcommand)]
        if "verbose" in arguments:  # Lightning would print the metrics of all loaders once per loader
            arguments["verbose"] = False

    def _warn_of_other_settings(self, folders: Sequence[Path]) -> None:
        """Warn if the model or the data have other settings than the fit that saved the checkpoint."""
        for config in (folder / "config.yaml" for folder in folders):
            if config.is_file():
                fitted = yaml.safe_load(config.read_text("utf-8"))
                changes = changed_settings(fitted, self.config[str(self.subcommand)].as_dict())
                if changes:
                    rank_zero_warn(
                        f"The checkpoint was fitted with other settings ({config}): {'; '.join(changes)}. Pass "
                        f"--config {config} to evaluate it as it was fitted."
                    )

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
            names = ["config.yaml", *(f"config-{number}.yaml" for number in range(1, 10_000))]
            self.config_filename = next(name for name in names if not (Path(folder) / name).exists())
        super().setup(trainer, pl_module, stage)

    @staticmethod
    def path_of(trainer: Trainer) -> Path | None:
        """The path of a trainer's saved config; None if it saves none."""
        folder = trainer.log_dir
        callbacks = callbacks_of(trainer, RunConfig)
        return Path(folder) / callbacks[0].config_filename if callbacks and folder is not None else None
