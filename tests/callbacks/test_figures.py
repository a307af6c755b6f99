"""The figures of a test: their files and logs, and that they show the predictions."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from distributed import run_on_ranks
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from matplotlib.figure import Figure
from tiny_training import CLASSES, Classifier, loader, mlp, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback
from lightning_bayes.callbacks import EvaluationFigures, figures
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.metrics import expected_calibration_error
from lightning_bayes.zoo import BayesClassifier

PNG = b"\x89PNG"


def pictures(examples, seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(examples, 1, 6, 6, generator=generator), torch.arange(examples) % CLASSES)


class Pictures(LightningDataModule):
    """Images, one set out of distribution and two shifted copies."""

    class_names = ("cat", "dog", "cow")
    ood_names = ("noise",)
    shift_names = (("fog", 1), ("fog", 2))
    mean, std = (0.5,), (0.25,)

    def train_dataloader(self):
        return DataLoader(pictures(24, 0), batch_size=8)

    def val_dataloader(self):
        return DataLoader(pictures(24, 1), batch_size=8)

    def test_dataloader(self):
        sets = [pictures(60, seed) for seed in (2, 3, 4, 5)]
        sets[1].tensors = (sets[1].tensors[0], torch.full((60,), -1))
        return [DataLoader(each, batch_size=16) for each in sets]


def classifier(net=None):
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)) if net is None else net
    return BayesClassifier(net, CLASSES, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))


@pytest.fixture
def drawn(monkeypatch):
    """Arguments of the drawing functions, by figure."""
    seen = {}
    draw = figures.draw

    def spy(predicted, *rest):
        seen["predicted"], seen["figures"] = predicted, draw(predicted, *rest)
        return seen["figures"]

    monkeypatch.setattr(figures, "draw", spy)
    return seen


def run_with(*callbacks, logger=False, folder=None):
    module = classifier()
    trainer = quiet_trainer(*callbacks, logger=logger, default_root_dir=folder)
    trainer.fit(module, datamodule=Pictures())
    rows = trainer.test(module, datamodule=Pictures(), verbose=False)
    return {key: value for row in rows for key, value in row.items()}, module


def test_all_figures_are_written_below_the_run(tmp_path, drawn):
    run_with(VOGNCallback(eval_samples=3), EvaluationFigures(), folder=tmp_path)
    written = {path.name: path.read_bytes() for path in (tmp_path / "figures").glob("*.png")}
    names = ["ood_scores.png", "reliability.png", "risk_coverage.png", "shift.png"]
    assert sorted(written) == names
    assert all(content.startswith(PNG) for content in written.values())
    assert list(drawn["predicted"].probs) == ["posterior", "mean"]


def test_figures_show_the_predictions_that_the_metrics_are_of(tmp_path, drawn):
    found, _ = run_with(VOGNCallback(eval_samples=3), EvaluationFigures(), folder=tmp_path)
    predicted = drawn["predicted"]
    for probs, prefix in zip(predicted.probs.values(), ("test", "test_mean"), strict=True):
        assert len(probs) == 60
        ece = expected_calibration_error(probs, predicted.targets).item()
        assert ece == pytest.approx(found[f"{prefix}/cal/ECE"], abs=1e-6)
    assert {name: set(sets) for name, sets in predicted.scores.items()} == {
        score: {"test", "noise"}
        for score in ("entropy", "max_probability", "mutual_information", "energy", "max_logit")
    }
    for axes, score in zip(drawn["figures"]["ood_scores"].axes, predicted.scores, strict=True):
        auroc = found[f"ood/noise/{score}/AUROC"]
        assert f"noise, AUROC {auroc:.3f}" in [text.get_text() for text in axes.get_legend().get_texts()]
    monte_carlo, mean = drawn["figures"]["shift"].axes[0].lines
    for line, prefix in ((monte_carlo, ""), (mean, "_mean")):
        keys = [f"test{prefix}/cls/Acc", *(f"shift{prefix}/fog/{level}/cls/Acc" for level in (1, 2))]
        assert line.get_ydata().tolist() == pytest.approx([found[key] for key in keys])


def test_the_scores_of_each_example_are_those_of_the_metrics(tmp_path):
    found, _ = run_with(VOGNCallback(eval_samples=3), EvaluationFigures(), folder=tmp_path)
    header, *rows = (tmp_path / "figures" / "scores.csv").read_text().split()
    columns = dict(zip(header.split(","), zip(*(map(float, row.split(",")) for row in rows), strict=True), strict=True))
    assert columns["target"] == tuple(range(CLASSES)) * (60 // CLASSES)
    for key in ("cls/Acc", "cls/NLL"):
        assert sum(columns[key]) / 60 == pytest.approx(found[f"test/{key}"], rel=1e-5)


def test_without_other_sets_and_samples_there_are_two_figures(tmp_path, drawn):
    module = classifier(mlp())
    quiet_trainer(EvaluationFigures(str(tmp_path / "here"))).test(module, loader(), verbose=False)
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == ["reliability.png", "risk_coverage.png", "scores.csv"]
    assert list(drawn["predicted"].probs) == ["prediction"]


def test_tensorboard_gets_the_figures(tmp_path):
    events_of = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    logger = TensorBoardLogger(tmp_path, name="tb")
    run_with(EvaluationFigures(), logger=logger, folder=tmp_path)
    events = events_of(logger.log_dir, size_guidance={"images": 0}).Reload()
    assert {"test/reliability", "test/risk_coverage", "test/ood_scores", "test/shift"} == set(events.Tags()["images"])


def test_a_logger_that_takes_images_gets_the_files(tmp_path):
    class TakesImages(DummyLogger):
        def __init__(self):
            super().__init__()
            self.taken = {}

        @property
        def experiment(self):
            return object()

        def log_image(self, key, images):
            self.taken[key] = [Path(path).read_bytes()[:4] for path in images]

    logger = TakesImages()
    quiet_trainer(EvaluationFigures(), logger=logger, default_root_dir=tmp_path).test(
        classifier(mlp()), loader(), verbose=False
    )
    assert logger.taken == {"test/reliability": [PNG], "test/risk_coverage": [PNG]}


class Service(Logger):
    """A logger whose experiment records what it is called with."""

    name, version = "service", 0

    def __init__(self, experiment):
        super().__init__()
        self.experiment = experiment

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass


class MLflowClient:
    """The signature of `mlflow.MlflowClient.log_figure`."""

    def __init__(self):
        self.taken = {}

    def log_figure(self, run_id, figure, artifact_file, *, save_kwargs=None):
        self.taken[artifact_file] = (run_id, type(figure))


class CometExperiment:
    """The signature of `comet_ml.Experiment.log_figure`."""

    def __init__(self):
        self.taken = {}

    def log_figure(self, figure_name=None, figure=None, overwrite=False, step=None):
        self.taken[figure_name] = (step, type(figure))


def test_mlflow_and_comet_get_the_figures(tmp_path):
    mlflow, comet = Service(MLflowClient()), Service(CometExperiment())
    mlflow.run_id = "0a1b"
    module = classifier(mlp())
    trainer = quiet_trainer(EvaluationFigures(), logger=[mlflow, comet], default_root_dir=tmp_path)
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(), verbose=False)
    assert trainer.global_step > 0
    for name in ("reliability", "risk_coverage"):
        assert mlflow.experiment.taken.pop(f"test/{name}.png") == ("0a1b", Figure)
        assert comet.experiment.taken.pop(f"test/{name}") == (trainer.global_step, Figure)
    assert mlflow.experiment.taken == comet.experiment.taken == {}


def test_loggers_that_take_no_figures_are_named(tmp_path, caplog):
    loggers = [CSVLogger(tmp_path), Service(object()), Service(CometExperiment())]
    trainer = quiet_trainer(EvaluationFigures(), logger=loggers)
    with caplog.at_level(logging.INFO):
        trainer.test(classifier(mlp()), loader(), verbose=False)
    (line,) = [line for line in caplog.messages if "2 figures" in line]
    assert line.endswith("figures; Service cannot log figures")


def test_a_module_that_hides_its_logits_is_refused_unless_figures_are_not_required(tmp_path):
    class Hiding(Classifier):
        def test_step(self, batch, batch_idx):
            return self(batch[0]).sum()

    with pytest.raises(UnsupportedTrainingError, match=r"Hiding\.test_step returned a Tensor without logits\. Return"):
        quiet_trainer(EvaluationFigures()).test(Hiding(), loader(), verbose=False)
    lenient = EvaluationFigures(str(tmp_path / "here"), required=False)
    quiet_trainer(lenient).test(Hiding(), loader(), verbose=False)
    assert not (tmp_path / "here").exists()


def test_a_fast_run_writes_nothing(tmp_path):
    trainer = quiet_trainer(EvaluationFigures(str(tmp_path / "here")), fast_dev_run=True)
    trainer.test(classifier(mlp()), loader(), verbose=False)
    assert not (tmp_path / "here").exists()


def draw_on_ranks(rank, folder):
    collected = {}
    draw = figures.draw

    def spy(predicted, *rest):
        collected["probs"], collected["targets"] = predicted.probs["prediction"], predicted.targets
        return draw(predicted, *rest)

    figures.draw = spy
    torch.manual_seed(0)
    trainer = quiet_trainer(EvaluationFigures(folder), devices=2, strategy="ddp")
    module = classifier(mlp())
    trainer.test(module, DataLoader(loader(examples=44).dataset, batch_size=6), verbose=False)
    return {**collected, "own": module(loader(examples=44).dataset.tensors[0]).softmax(-1).detach()}


# Lightning recommends one device for exact tests: a distributed sampler may repeat examples.
@pytest.mark.ddp
def test_one_of_two_ranks_draws_the_predictions_of_both(tmp_path):
    first, second = run_on_ranks(draw_on_ranks, 2, tmp_path, str(tmp_path / "figures"))
    assert "probs" not in second
    assert len(first["probs"]) == 44
    order = torch.cat([torch.arange(0, 44, 2), torch.arange(1, 44, 2)])  # the order of the distributed sampler
    torch.testing.assert_close(first["probs"], first["own"][order])
    assert (tmp_path / "figures" / "reliability.png").read_bytes().startswith(PNG)
