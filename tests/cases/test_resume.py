"""Resuming under another setting is refused, with the saved and the new value; the table stands in `optim.resuming`."""

from __future__ import annotations

import re

import pytest
import torch
from tiny_training import Classifier, loader, quiet_trainer, two_groups
from torch.optim import SGD, AdamW

from lightning_bayes import (
    VOGN,
    IVONCallback,
    LaplaceCallback,
    MCDropoutCallback,
    NoisyKFACCallback,
    OGNCallback,
    SWAGCallback,
    VadamCallback,
    VOGNCallback,
    callbacks,
)
from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.errors import PosteriorError

ALGORITHMS = [
    kind
    for name in callbacks.__all__
    if isinstance(kind := getattr(callbacks, name), type)
    and issubclass(kind, VariationalCallback)
    and not kind.__abstractmethods__
]
CHANGES = {
    "Vadam": (VadamCallback, {}, None, r"the algorithm \(saved: VOGN; now: Vadam\)"),
    "IVON": (IVONCallback, {}, None, r"the algorithm \(saved: VOGN; now: IVON\)"),
    "Noisy K-FAC": (NoisyKFACCallback, {}, None, r"the algorithm \(saved: VOGN; now: NoisyKFAC\)"),
    "OGN": (OGNCallback, {}, None, r"the algorithm \(saved: VOGN; now: OGN\)"),
    "the paper's step": (VOGNCallback, {"lr": 0.1}, None, r"the step \(saved: user; now: natural\)"),
    "bayesian=": (
        VOGNCallback,
        {"bayesian": r"^net\.2\."},
        None,
        r"with a posterior \(saved: 4, with net\.0\.bias, net\.0\.weight",
    ),
    "SGD": (VOGNCallback, {}, lambda m: SGD(m.parameters(), 0.01), r"moves the mean \(saved: AdamW; now: SGD\)"),
    "groups": (VOGNCallback, {}, lambda m: AdamW(two_groups(m)), r"the parameter groups \(saved: net\.0\.weight"),
}


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize(("callback", "arguments", "configure", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_another_setting_is_refused_with_both_names(callback, arguments, configure, message, tmp_path):
    trainer = quiet_trainer(VOGNCallback())
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    module = Classifier() if configure is None else Classifier(configure)
    with pytest.raises(PosteriorError, match=message):
        quiet_trainer(callback(**arguments), max_epochs=2).fit(module, loader(), ckpt_path=tmp_path / "last.ckpt")


def swag():
    return SWAGCallback(start=0.0)


def dropout():
    return MCDropoutCallback(p=0.1, layers=r"net\.1")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of every algorithm, by its name."""
    paths, folder = {}, tmp_path_factory.mktemp("written")
    for new in (*ALGORITHMS, swag, LaplaceCallback):
        callback = new()
        trainer = quiet_trainer(callback, max_epochs=2)
        trainer.fit(Classifier(), loader())
        name = callback.name if isinstance(callback, VariationalCallback) else type(callback).__name__
        paths[name] = folder / f"{name}.ckpt"
        trainer.save_checkpoint(paths[name])
    return paths


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.filterwarnings("ignore:The search for the prior precision")
@pytest.mark.parametrize("new", ALGORITHMS, ids=lambda new: new.__name__)
def test_no_algorithm_resumes_the_state_of_another(new, written):
    own, refused = new(), {}
    for name, path in written.items():
        try:
            quiet_trainer(new(), max_epochs=3).fit(Classifier(), loader(), ckpt_path=path)
        except PosteriorError as error:
            refused[name] = str(error)
    assert refused.keys() == written.keys() - {own.name}
    named = rf"\(saved: \w+; now: {own.optimizer_class.__name__}\)|not written with {own.name}"
    assert [text for text in refused.values() if not re.search(named, text)] == []


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize("new", [swag, LaplaceCallback, dropout])
def test_the_users_optimizer_does_not_resume_a_noisy_one(new, written):
    with pytest.raises(PosteriorError, match=r"algorithm has changed \(saved: VOGN; now: the user's optimizer"):
        quiet_trainer(new(), max_epochs=3).fit(Classifier(), loader(), ckpt_path=written["VOGNCallback"])


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize(
    ("new", "writer"),
    [(LaplaceCallback, "SWAGCallback"), (swag, "LaplaceCallback"), (VOGNCallback, "SWAGCallback")],
)
def test_the_posterior_of_another_callback_is_not_evaluated(new, writer, written):
    with pytest.raises(PosteriorError, match=rf"holds a posterior of {writer}, which"):
        quiet_trainer(new()).predict(Classifier(), loader(), ckpt_path=written[writer])


def test_a_state_of_another_format_is_refused_by_its_number():
    optimizer = torch.optim.Adam((model := torch.nn.Linear(2, 1)).parameters())
    noisy = VOGN(model, base=optimizer, num_data=4)
    with pytest.raises(PosteriorError, match="has format 1, and this version reads format 4"):
        noisy.load_state_dict({**noisy.state_dict(), "format": 1})
