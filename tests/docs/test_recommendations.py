"""Every recommendation of a message is run on the module that got it; a new one without a case fails here."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from lightning_utilities.core import rank_zero
from recommendations import CASES, ELSEWHERE, advises, messages

ROOT = Path(__file__).parents[2]


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def said(action, folder):
    """What an action logs, warns of and raises; an error ends it."""
    heard = Heard()
    # Messages of rank zero go to the logger of the package imported last: an import of pytorch_lightning takes them over.
    loggers = [logging.getLogger("lightning.pytorch"), rank_zero.log]
    levels = [logger.level for logger in loggers]  # other tests, such as the demo's, lower them
    torch.manual_seed(0)
    try:
        for logger in loggers:
            logger.setLevel(logging.INFO)
            logger.addHandler(heard)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                action()
                error = None
            except Exception as found:
                error = found
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(heard)
            logger.setLevel(level)
    return "\n".join([*heard.lines, *(str(warning.message) for warning in caught), str(error or "")]), error


def matches(fragment, text):
    """Whether the words of a fragment stand in a text; an expression is any text."""
    parts = fragment.split("{}")
    position = 0
    for part in parts:
        position = text.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


def test_every_recommendation_has_a_case():
    keys = [*CASES, *ELSEWHERE]
    texts = list(messages())
    missing = [f"{path}: {text}" for path, text in texts if advises(text) and not any(key in text for key in keys)]
    stale = [key for key in keys if not any(key in text for _, text in texts)]
    assert not missing, "\n".join(missing)
    assert not stale, stale


@pytest.mark.parametrize("key", CASES)
def test_a_recommendation_can_be_followed(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, taken = CASES[key]
    text, _ = said(given, tmp_path)
    assert matches(key, text), text[-600:]
    for number, action in enumerate(taken):
        text, error = said(action, tmp_path)
        assert error is None, f"{key}, advice {number}: {error!r}"
        assert not matches(key, text), f"{key}, advice {number}: {text}"


def test_the_tests_that_follow_the_other_recommendations_exist():
    names = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    assert {*ELSEWHERE.values()} <= names
