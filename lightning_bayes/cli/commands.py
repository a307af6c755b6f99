"""The command ``lightning-bayes`` and its subcommands.

Help, lists, reports and misspelled names do not import torch, which takes seconds.
"""

from __future__ import annotations

import argparse
import difflib
import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Final

from lightning_bayes.cli.composition import (
    CONFIG_OPTIONS,
    known,
    packaged_posteriors,
    packaged_presets,
    require_known,
    split_options,
)
from lightning_bayes.errors import BayesError, ConfigError

USAGE: Final = """usage: lightning-bayes fit|validate|test|predict|laplace|export|report|list|demo [arguments]

Train, validate, test and predict with a posterior over the weights.

  lightning-bayes fit --config digits+lenet5+vogn               train; CONFIG is DATA+MODEL+METHOD, a recipe or a file
  lightning-bayes fit --config digits+lenet5+vogn --trainer.max_epochs=5 --trainer.callbacks.mc_samples=2
  lightning-bayes fit --config digits+lenet5+vogn --ckpt_path=last
                                                                continue the last run
  lightning-bayes test --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
  lightning-bayes laplace --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
                                                                test with a Laplace posterior and save it
  lightning-bayes predict --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
      --data.predict_dir=FOLDER --output=predictions.csv --reject_below=0.8
                                                                predict unlabelled images (.csv, .parquet or .pt)
  lightning-bayes export RUN net.safetensors                    write a posterior file for Predictor.load
  lightning-bayes report RUN [RUN ...]                          compare runs on one HTML page
  lightning-bayes list configs|data|models|methods|presets|posteriors
                                                                list what is available
  lightning-bayes demo                                          compare Adam and VOGN on handwritten digits
  lightning-bayes fit --help                                    show all arguments
  lightning-bayes fit --trainer.callbacks.help=VOGNCallback     show the arguments of a class
  lightning-bayes --version

--debug prints full error messages and tracebacks."""
COMMANDS: Final = ("fit", "validate", "test", "predict", "laplace", "export", "report", "list", "demo")
_PROGRAMS: Final = {  # command: the function that takes its arguments, imported when it runs
    "report": "lightning_bayes.report.command:main",
    "export": "lightning_bayes.cli.finished_run:export",
    "demo": "lightning_bayes.cli.demo:main",
}
LISTS: Final = ("configs", "data", "models", "methods", "presets", "posteriors")


def main() -> None:
    """Run the command line of this process.

    Raises:
        SystemExit: With status 2 if the command, a config or an argument is unknown; with status 1 and the message for an
            error of this package or a missing dependency.
    """
    is_debugging = "--debug" in sys.argv
    try:
        with _quiet_without_reader():
            _run([word for word in sys.argv[1:] if word != "--debug"] or ["--help"], is_debugging)
    except Exception as error:
        cause = _without_traceback(error)
        if cause is None or is_debugging:
            raise
        kind = type(cause)
        # torch adds a traceback to the message of a data-loading worker's error
        message = str(cause).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2]
        raise SystemExit(f"lightning-bayes: {kind.__name__}: {message}") from error


@contextmanager
def _quiet_without_reader() -> Iterator[None]:
    """Context that ends the process without a traceback once the reader of its output, such as ``head``, has gone."""
    try:
        try:
            yield
        except SystemExit:  # of a parser that has printed its help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_without_reader():  # the pipe of a process that loads data, for example
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it exits
        raise SystemExit(141) from None  # as of a process that SIGPIPE ends


def _is_without_reader() -> bool:
    output = select.poll()
    output.register(sys.stdout, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))


def _without_traceback(error: BaseException | None) -> BaseException | None:
    """The first error in the chain of causes that needs no traceback: one of this package, or a missing dependency."""
    while error is not None and not isinstance(error, (BayesError, ModuleNotFoundError)):
        error = error.__cause__  # jsonargparse wraps the errors of constructors
    return error


def _run(words: Sequence[str], is_debugging: bool) -> None:
    command, *arguments = words
    if command in {"-h", "--help"}:
        print(USAGE)
    elif command == "--version":
        print(f"lightning-bayes {version('lightning-bayes')}")
    elif command == "list":
        _list(arguments)
    elif command in _PROGRAMS:
        module, _, function = _PROGRAMS[command].partition(":")
        getattr(import_module(module), function)(arguments)
    else:
        try:
            _require_command(command)
            for option, config in split_options(words, CONFIG_OPTIONS):
                if option and config:
                    require_known(config)
        except ConfigError as error:
            print(f"lightning-bayes: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        from lightning_bayes.cli.bayes_cli import run

        run(words, is_debugging)


def _require_command(command: str) -> None:
    if command not in COMMANDS and not command.startswith("-"):
        close = difflib.get_close_matches(command, COMMANDS, 1)
        question = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"There is no command {command}.{question} The commands are {', '.join(COMMANDS)}.")


def _list(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("lightning-bayes list", description="Print all names of one kind, one per line.")
    parser.add_argument("kind", choices=LISTS, help="recipes, or parts for --config DATA+MODEL+METHOD")
    entries = _entries(parser.parse_args(words).kind)
    width = max((len(name) for name, _ in entries), default=0)
    for name, description in entries:
        print(f"{name:{width}}  {description}".rstrip())


def _entries(kind: str) -> Iterable[tuple[str, str]]:
    """Names with descriptions. Several callbacks may have a preset of the same name."""
    if kind == "presets":
        return [(name, f"{callback}.from_preset({name!r})") for name, callback in packaged_presets()]
    if kind == "configs":
        named = known("recipes")
    elif kind == "models":
        sources = {"timm/NAME": "any model of timm", "torchvision/NAME": "any model of torchvision"}
        named = known("models") | sources
    elif kind == "posteriors":
        named = packaged_posteriors()
    else:
        named = known(kind) | (known("evaluation") if kind == "methods" else {})
    return named.items()
