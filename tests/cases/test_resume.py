"""Resuming under another setting is refused, with the saved and the new value; the table stands in `optim.resuming`."""

from __future__ import annotations

import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import Classifier, loader, quiet_trainer, two_groups
from torch.optim import SGD, AdamW

from lightning_bayes import (
    VOGN,
    IVONCallback,
    LaplaceCallback,
    MCDropoutCallback,
    MultiModeCallback,
    NoisyKFACCallback,
    OGNCallback,
    SWAGCallback,
    VadamCallback,
    VOGNCallback,
    callbacks,
)
from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.errors import PosteriorError
from lightning_bayes.posthoc import SWAG

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
ALGORITHMS = [
    kind
    for name in callbacks.__all__
    if isinstance(kind := getattr(callbacks, name), type)
    and issubclass(kind, VariationalCallback)
    and kind is not callbacks.OptimizerCallback  # has no algorithm of its own
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


@pytest.mark.parametrize("new", [swag, LaplaceCallback, dropout])
def test_the_users_optimizer_does_not_resume_a_noisy_one(new, written):
    with pytest.raises(PosteriorError, match=r"algorithm has changed \(saved: VOGN; now: the user's optimizer"):
        quiet_trainer(new(), max_epochs=3).fit(Classifier(), loader(), ckpt_path=written["VOGNCallback"])


@pytest.mark.parametrize(
    ("new", "writer"),
    [(LaplaceCallback, "SWAGCallback"), (swag, "LaplaceCallback"), (VOGNCallback, "SWAGCallback")],
)
def test_the_posterior_of_another_callback_is_not_evaluated(new, writer, written):
    with pytest.raises(PosteriorError, match=rf"holds a posterior of {writer}, which"):
        quiet_trainer(new()).predict(Classifier(), loader(), ckpt_path=written[writer])


def trained(tmp_path, callback, module=None, **options):
    """A checkpoint of a fit, and its predictions."""
    module = module or Classifier()
    trainer = quiet_trainer(callback, max_epochs=2, **options)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt", predicted(trainer, module)


def predicted(trainer, module, path=None):
    return torch.cat([batch["probs"] for batch in trainer.predict(module, loader(), ckpt_path=path)])


def diagonal(**options):
    return LaplaceCallback("diagonal", prior_precision=1.0, **options)


@pytest.mark.filterwarnings("ignore:The search for the prior precision")
def test_an_evaluation_keeps_laplaces_posterior_and_says_so_and_a_fit_makes_a_new_one(tmp_path):
    path, expected = trained(tmp_path, diagonal())
    with pytest.warns(
        UserWarning, match=r"posterior, with structure='diagonal' \(now 'kronecker'\), subset='last_layer'"
    ):
        found = predicted(quiet_trainer(LaplaceCallback(subset="all")), Classifier(), path)
    torch.testing.assert_close(found, expected)
    resumed = LaplaceCallback(subset="all", prior_precision=1.0)
    quiet_trainer(resumed, max_epochs=3).fit(Classifier(), loader(), ckpt_path=path)
    assert len(resumed.posterior.mean) == 4


def test_other_dropout_than_that_of_the_checkpoint_is_named(tmp_path):
    path, _ = trained(tmp_path, dropout())
    with pytest.warns(UserWarning, match=r"trained with other dropout, p=0\.1 \(now 0\.5\)\.$"):
        predicted(quiet_trainer(MCDropoutCallback(p=0.5, layers=r"net\.1")), Classifier(), path)


# Arguments that act from now on; what was collected, found or chosen before is kept. Warnings would be errors here.
NEW = {
    "SWAG, later": (swag, lambda: SWAGCallback(start=0.5)),
    "SWAG, other rate": (swag, lambda: SWAGCallback(start=0.0, lr=0.1)),
    "SWAG, samples": (swag, lambda: SWAGCallback(start=0.0, eval_samples=3, seed=1)),
    "Laplace, samples": (diagonal, lambda: diagonal(eval_samples=3, seed=1, linearized=True)),
    "dropout, samples": (dropout, lambda: MCDropoutCallback(3, p=0.1, layers=r"net\.1", seed=1, val_samples=2)),
    "modes, peak": (lambda: MultiModeCallback(2), lambda: MultiModeCallback(2, peak=3.0)),
    "VOGN, samples": (VOGNCallback, lambda: VOGNCallback(eval_samples=3)),
    "K-FAC, samples": (NoisyKFACCallback, lambda: NoisyKFACCallback(eval_samples=3)),
}


@pytest.mark.parametrize(("writer", "reader"), NEW.values(), ids=NEW.keys())
def test_arguments_that_belong_to_no_state_may_change(writer, reader, tmp_path):
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    quiet_trainer(writer(), saving, max_epochs=4, enable_checkpointing=True).fit(Classifier(), loader())
    resumed = quiet_trainer(reader(), max_epochs=4)
    resumed.fit(Classifier(), loader(), ckpt_path=tmp_path / "epoch=2.ckpt")
    assert predicted(resumed, Classifier(), tmp_path / "epoch=3.ckpt").shape == (48, 3)


def test_swag_with_a_larger_rank_scales_the_deviations_that_it_has():
    values = [torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    first, larger = SWAG(max_rank=2), SWAG(max_rank=9)
    for value in values[:5]:
        first.collect({"w": value})
    larger.load_state_dict(first.state_dict())
    larger.collect({"w": values[5]})
    first = SWAG(max_rank=3)
    for value in values:
        first.collect({"w": value})
    found, expected = (swag.posterior(10, {"w": 1.0}).deviations["w"] for swag in (larger, first))
    torch.testing.assert_close(found, expected)


def test_a_state_of_another_format_is_refused_by_its_number():
    optimizer = torch.optim.Adam((model := torch.nn.Linear(2, 1)).parameters())
    noisy = VOGN(model, base=optimizer, num_data=4)
    with pytest.raises(PosteriorError, match="has format 1, and this version reads format 4"):
        noisy.load_state_dict({**noisy.state_dict(), "format": 1})
