"""The configs that a name stands for, merged as LightningCLI merges them."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from lightning_bayes.cli.composition import configs_of


def compose(name):
    """One config."""
    config = {"trainer": {"callbacks": []}}
    for text in configs_of(name):
        _merge(config, json.loads(text) if text.startswith("{") else yaml.safe_load(Path(text).read_text("utf-8")))
    return config


def _merge(config, layer):
    for key, value in layer.items():
        if key.endswith("+"):
            config[key[:-1]] = [*config.get(key[:-1], []), *value]
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = value
