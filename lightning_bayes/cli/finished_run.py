"""A finished run as a servable posterior: ``lightning-bayes export RUN net.safetensors``, and ``Predictor.load(RUN)``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lightning_bayes.cli.runs import drop_pretrained
from lightning_bayes.errors import RunError
from lightning_bayes.report import read_runs
from lightning_bayes.report.runs import joined


def export(words: Sequence[str]) -> None:
    """Run the command with the arguments that follow ``lightning-bayes export``."""
    parser = argparse.ArgumentParser("lightning-bayes export", description="Write a run's posterior file and its card.")
    parser.add_argument("run", help="folder of a fit of the command line, with config.yaml and checkpoints")
    parser.add_argument("file", help="file to write, such as net.safetensors; its model card is net.md")
    options = parser.parse_args(words)
    from lightning_bayes.zoo import save_posterior

    contents = dict(vars(saved_run(options.run)))
    model, posterior, likelihood = (contents.pop(name) for name in ("model", "posterior", "likelihood"))
    card = save_posterior(options.file, model, posterior, link=likelihood, **contents)
    print(f'wrote {options.file} and {card}; serve it with Predictor.load("{options.file}")')


def saved_run(folder: str | Path) -> Any:
    """The `lightning_bayes.zoo.SavedPosterior` of a run of the command line, from its config and its last checkpoint."""
    from lightning_bayes.cli.bayes_cli import instantiate
    from lightning_bayes.optim.readout import load_posterior
    from lightning_bayes.zoo import SavedPosterior

    config, checkpoints = Path(folder) / "config.yaml", sorted((Path(folder) / "checkpoints").glob("*.ckpt"))
    if not (config.is_file() and checkpoints):
        raise RunError(
            f"{folder} is not the folder of a fit: it needs config.yaml and a file in checkpoints. Pass a folder such as "
            "runs/digits_lenet5_vogn/version_0."
        )
    checkpoint = next((path for path in checkpoints if path.stem == "last"), checkpoints[-1])
    posterior = load_posterior(checkpoint).select("model.")
    settings = yaml.safe_load(config.read_text("utf-8"))
    parts = deepcopy({part: settings[part] for part in ("model", "data")})
    drop_pretrained(parts["model"])
    text = json.dumps(parts)
    run = instantiate(text, "--seed_everything=false", "--trainer.logger=false", "--trainer.accelerator=cpu")
    content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = _network(run.model.model, parts["model"]["init_args"]["model"]).eval()
    model.load_state_dict({**posterior.constants, **posterior.mean})
    return SavedPosterior(
        model=model,
        posterior=posterior,
        transform=getattr(run.datamodule, "transform", None),
        class_names=tuple(content.get("class_names", ())),
        metrics=_metrics(Path(folder)),
        config=settings,
        temperature=posterior.temperature,
        likelihood=posterior.likelihood,
    )


def _metrics(folder: Path) -> dict[str, float]:
    """The metrics of a run's last validation, and of its test in a folder beside it."""
    runs = joined(read_runs([folder.parent]))
    values = next(run.last for run in runs if run.folder.resolve() == folder.resolve())
    return {key: value for key, value in values.items() if key.startswith(("val", "test", "ood"))}


def _network(network: nn.Module, built: dict[str, Any]) -> nn.Module:
    """The network of a run; by `create_model` if it has a name there, so that anybody can build it again."""
    from lightning_bayes.zoo import create_model
    from lightning_bayes.zoo.registry import MODELS

    path, arguments = built["class_path"], built.get("init_args", {})
    is_ours = type(network).__module__.startswith("lightning_bayes.") and "num_classes" in arguments
    for name, entry in MODELS.items():
        is_this_class = path.rpartition(".")[2] == entry.class_path.rpartition(".")[2]
        if is_ours and is_this_class and entry.arguments.items() <= arguments.items():
            return create_model(name, **{**arguments, **entry.arguments})
    return network
