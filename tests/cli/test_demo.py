"""The demo, shortened: what it prints and writes."""

from __future__ import annotations

import logging

import pytest

from lightning_bayes import load_posterior
from lightning_bayes.cli import demo

# Two epochs, in a folder that no logger writes to.
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


@pytest.fixture(autouse=True)
def _level_is_put_back():
    """The demo quietens Lightning for its process."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    yield
    logger.setLevel(level)


def test_demo_prints_one_table_and_writes_what_it_names(tmp_path, capsys):
    demo.main(["--root", str(tmp_path), "--epochs", "2"])
    printed = capsys.readouterr().out
    for word in (
        "Adam",
        "Adam, T",
        "VOGN mean",
        "VOGN MC (64)",
        "parameters of VOGN's posterior",
        *demo.COLUMNS,
    ):
        assert word in printed
    for written in (
        "vogn/figures/reliability.png",
        "adam/figures/ood_scores.png",
        "vogn/checkpoints/last.ckpt",
        "vogn/config.yaml",
        "demo.png",
    ):
        assert (tmp_path / written).is_file()
    assert {"model.conv1.weight", "model.fc3.bias"} <= load_posterior(
        tmp_path / "vogn" / "checkpoints" / "last.ckpt"
    ).mean.keys()


def test_the_scores_of_predictions_are_the_metrics_of_the_test(tmp_path):
    fitted = demo.fit("digits+lenet5+adam", tmp_path, 0, False, ["--trainer.max_epochs=1"])
    assert demo.scores(fitted.probs, fitted.targets) == pytest.approx(fitted.metrics(), abs=1e-5)
    assert demo.scores(fitted.tempered, fitted.targets)["cls/Acc"] == pytest.approx(fitted.metrics()["cls/Acc"])


@pytest.mark.slow
def test_default_arguments_keep_their_promises_over_five_seeds():
    from benchmarks.demo_seeds import collect, criteria

    assert all(criteria(collect(range(5))).values())
