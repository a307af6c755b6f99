"""The table of Lightning's private symbols is checked before a fit; see tests/test_private_symbols.py for other uses."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
from tiny_training import Classifier, loader, quiet_trainer

from benchmarks.house.private_symbols import private_uses
from benchmarks.house.sources import source_files
from lightning_bayes import VOGNCallback
from lightning_bayes.callbacks.trainer import private_lightning
from lightning_bayes.errors import UnsupportedTrainingError

ROOT = Path(__file__).parents[3]


def test_the_table_lists_what_its_file_uses():
    listed = {method.name for method in private_lightning.METHODS} | set(private_lightning.CLOSURE_PARTS)
    listed |= {name for _, name in private_lightning.ATTRIBUTES} | {private_lightning.MODE}
    used = {
        use.name for use in private_uses(source_files(ROOT)) if use.file == "callbacks/trainer/private_lightning.py"
    }
    assert used == listed


def test_a_missing_symbol_is_named_with_the_version(monkeypatch):
    trainer = quiet_trainer(VOGNCallback())
    monkeypatch.delattr(type(trainer.fit_loop), "_should_accumulate")
    message = rf"Lightning {lightning.__version__} .*trainer\.fit_loop\._should_accumulate is missing.*2\.5\.1 to 2\."
    with pytest.raises(UnsupportedTrainingError, match=message):
        trainer.fit(Classifier(), loader())


def test_the_tested_versions_are_those_of_the_documentation():
    assert f"lightning=={private_lightning.OLDEST_TESTED}\n" in (ROOT / "tests" / "oldest.txt").read_text("utf-8")
    rows = [
        line for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines() if line.startswith("| newest |")
    ]
    assert f"| {private_lightning.NEWEST_TESTED} |" in rows[0]
