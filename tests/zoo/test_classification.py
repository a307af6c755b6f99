from __future__ import annotations

import math

import numpy as np
import pytest
import tiny_training
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from lightning.pytorch import Callback, LightningDataModule
from scipy.special import logsumexp, softmax
from scipy.stats import entropy
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score, roc_curve
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.zoo import MLP, BayesClassifier, DigitsDataModule, LeNet5
from lightning_bayes.zoo.tasks.evaluation import ExampleStatistics

METRICS = [
    *("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE", "cal/MCE", "cal/aECE", "cal/cECE"),
    *("sc/AURC", "sc/Cov_5Risk", "sc/Risk_80Cov", "mis/AUROC", "mis/AUPR", "mis/FPR95"),
]
POINT_SCORES = ["entropy", "max_probability", "energy", "max_logit"]
DETECTION = ["AUROC", "AUPR", "FPR95"]


def loader(inputs, targets=None, batch_size=8):
    targets = torch.full((len(inputs),), -1) if targets is None else targets
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


def toy_data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(30, 4, generator=generator), torch.randint(3, (30,), generator=generator)


@pytest.fixture
def toy():
    return toy_data()


@pytest.fixture
def task():
    torch.manual_seed(0)
    return BayesClassifier(MLP(4, 3), num_classes=3)


def test_learns_the_digits_and_logs_exactly_the_stated_keys(quiet_trainer):
    torch.manual_seed(0)
    task = BayesClassifier(LeNet5(image_size=8), 10, optimizer=lambda p: torch.optim.Adam(p, lr=5e-3))
    trainer = quiet_trainer(max_epochs=15)
    data = DigitsDataModule()
    trainer.fit(task, datamodule=data)
    assert set(trainer.callback_metrics) == {"train/loss", "val/loss", *(f"val/{key}" for key in METRICS)}
    results = trainer.test(task, datamodule=data, verbose=False)[0]
    scores = ["", *(f"{score}/" for score in POINT_SCORES)]
    names = ["", *(f"{name}/{score}" for name in ("patches", "shuffled") for score in scores)]
    ood = {f"ood/{name}{key}" for name in names for key in DETECTION}
    assert set(results) == {*(f"test/{key}" for key in (*METRICS, "n", "cls/NLL_SE")), *ood}
    assert results["test/cls/Acc"] > 0.9


def test_scores_equal_scikit_learn_on_the_predicted_logits(quiet_trainer):
    torch.manual_seed(0)
    task, trainer, data = BayesClassifier(LeNet5(image_size=8), 10), quiet_trainer(), DigitsDataModule(batch_size=90)
    results = trainer.test(task, datamodule=data, verbose=False)[0]
    logits = [torch.cat(part).double().numpy() for part in trainer.predict(task, datamodule=data)]
    probs = [softmax(part, axis=-1) for part in logits]
    targets = data.test_set.tensors[1].numpy()
    assert results["test/cls/Acc"] == pytest.approx(accuracy_score(targets, probs[0].argmax(-1)))
    assert results["test/cls/NLL"] == pytest.approx(log_loss(targets, probs[0], labels=range(10)), rel=1e-5)
    losses = -np.log(probs[0][range(400), targets])
    assert results["test/n"] == 400
    assert results["test/cls/NLL_SE"] == pytest.approx(losses.std() / 20, rel=1e-3)
    inside, patches, shuffled = (-(p * np.log(p)).sum(-1) for p in probs)
    outside = {"": np.concatenate([patches, shuffled]), "patches/": patches, "shuffled/": shuffled}
    for name, scores in outside.items():
        _assert_detection(results, f"ood/{name}", inside, scores)
    for score, of in {
        "entropy": lambda z: entropy(softmax(z, axis=-1), axis=-1),
        "max_probability": lambda z: -softmax(z, axis=-1).max(-1),
        "energy": lambda z: -logsumexp(z, axis=-1),
        "max_logit": lambda z: -z.max(-1),
    }.items():
        inside, *others = map(of, logits)
        for name, scores in zip(("patches", "shuffled"), others, strict=True):
            _assert_detection(results, f"ood/{name}/{score}/", inside, scores)


def test_mutual_information_is_logged_where_any_process_has_samples():
    statistics, alone = ExampleStatistics("test/"), ExampleStatistics("test/")
    statistics.update(torch.zeros(3, 4, 2), torch.zeros(4, dtype=torch.long))
    alone.update(torch.zeros(1, 4, 2), torch.zeros(4, dtype=torch.long))
    alone.merge_state(statistics)  # as a synchronisation of processes merges states
    assert alone.compute()["test/n"] == 8
    assert alone.compute()["test/cls/MI"] == 0
    alone.reset()
    alone.update(torch.zeros(1, 4, 2), torch.zeros(4, dtype=torch.long))
    assert "test/cls/MI" not in alone.compute()


def _assert_detection(results, prefix, inside, outside):
    scores, is_ood = np.concatenate([inside, outside]), np.repeat([0, 1], [len(inside), len(outside)])
    fpr, tpr, _ = roc_curve(is_ood, scores, drop_intermediate=False)
    # Entropies of an untrained network are nearly equal, so float32 may swap a few of the 160 000 pairs.
    assert results[prefix + "AUROC"] == pytest.approx(roc_auc_score(is_ood, scores), abs=1e-3)
    assert results[prefix + "AUPR"] == pytest.approx(average_precision_score(is_ood, scores), abs=1e-3)
    assert results[prefix + "FPR95"] == pytest.approx(fpr[tpr >= 0.95].min(), abs=5e-3)


def test_training_loss_is_the_mean_cross_entropy(task, toy, quiet_trainer):
    inputs, targets = toy
    with torch.no_grad():
        expected = -task.model(inputs).log_softmax(-1)[torch.arange(30), targets].mean()
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(task, loader(inputs, targets, batch_size=30), loader(inputs, targets))
    torch.testing.assert_close(trainer.callback_metrics["train/loss"], expected)


def test_validation_loss_weighs_every_example_equally(task, toy, quiet_trainer):
    inputs, targets = toy
    expected = log_loss(targets, task(inputs).double().softmax(-1).detach())
    (results,) = quiet_trainer().validate(task, loader(inputs, targets, batch_size=7), verbose=False)  # 4 · 7 + 2
    assert results["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert results["val/cls/NLL"] == pytest.approx(expected, rel=1e-5)


def test_metrics_are_reset_every_epoch(task, toy, quiet_trainer):
    trainer, inputs = quiet_trainer(), toy[0]
    trainer.test(task, loader(inputs, (task(inputs).argmax(-1) + 1) % 3), verbose=False)
    (results,) = trainer.test(task, loader(inputs, task(inputs).argmax(-1)), verbose=False)
    assert results["test/cls/Acc"] == 1


def test_evaluation_uses_a_replaced_forward(task, toy, quiet_trainer):
    inputs, targets = toy
    certain = 0.5 * nn.functional.one_hot(targets, 3) + 0.5 / 3
    task.forward = lambda x: certain[: len(x)].log()  # as the evaluation callback does: logs of averaged probabilities
    (results,) = quiet_trainer().test(task, loader(inputs, targets, batch_size=30), verbose=False)
    assert results["test/cls/NLL"] == pytest.approx(-math.log(2 / 3), rel=1e-5)
    (results,) = quiet_trainer().validate(task, loader(inputs, targets, batch_size=30), verbose=False)
    assert results["val/loss"] == pytest.approx(-math.log(2 / 3), rel=1e-5)


def test_a_single_ood_set_is_logged_once(task, toy, quiet_trainer):
    loaders = [loader(*toy), loader(torch.randn(9, 4, generator=torch.Generator().manual_seed(1)))]
    results = quiet_trainer().test(task, loaders, verbose=False)[0]
    parts = ["ood/", *(f"ood/set1/{score}/" for score in POINT_SCORES)]
    assert {key for key in results if key.startswith("ood")} == {part + key for part in parts for key in DETECTION}


def test_sets_without_names_are_numbered(task, toy, quiet_trainer):
    results = quiet_trainer().test(task, [loader(*toy), loader(toy[0] + 1), loader(toy[0] + 2)], verbose=False)[0]
    assert {"ood/set1/AUROC", "ood/set2/AUROC"} <= set(results)


def test_without_ood_sets_no_ood_metric_is_logged(task, toy, quiet_trainer):
    quiet_trainer().test(task, [loader(*toy), loader(toy[0])], verbose=False)
    (results,) = quiet_trainer().test(task, loader(*toy), verbose=False)
    assert not any(key.startswith("ood") for key in results)


def test_names_that_do_not_fit_the_sets_are_rejected(task, toy, quiet_trainer):
    class Misnamed(LightningDataModule):
        ood_names = ("only",)

        def test_dataloader(self):
            return [loader(*toy), loader(toy[0]), loader(toy[0])]

    with pytest.raises(
        HyperparameterError, match=r"Misnamed\.ood_names is \['only'\], but test_dataloader returns 2 sets"
    ):
        quiet_trainer().test(task, datamodule=Misnamed(), verbose=False)


class Shifted(LightningDataModule):
    """The toy set, one out-of-distribution set, and three shifted copies."""

    ood_names = ("noise",)
    shift_names = (("fog", 1), ("fog", 3), ("snow", 3))

    def __init__(self, toy):
        super().__init__()
        self.inputs, self.targets = toy

    def shifted(self):
        return [self.inputs + 0.5, 2 * self.inputs, -self.inputs]

    def test_dataloader(self):
        outside = loader(3 * torch.randn(10, 4, generator=torch.Generator().manual_seed(1)))
        return [loader(self.inputs, self.targets), outside, *(loader(x, self.targets) for x in self.shifted())]


def test_shifted_copies_are_scored_by_kind_and_severity(task, toy, quiet_trainer):
    data = Shifted(toy)
    results = {k: v for row in quiet_trainer().test(task, datamodule=data, verbose=False) for k, v in row.items()}
    values = []
    for (kind, severity), inputs in zip(data.shift_names, data.shifted(), strict=True):
        probs = task(inputs).double().softmax(-1).detach()
        values.append([accuracy_score(toy[1], probs.argmax(-1)), log_loss(toy[1], probs)])
        found = [results[f"shift/{kind}/{severity}/cls/{key}"] for key in ("Acc", "NLL")]
        assert found == pytest.approx(values[-1], rel=1e-5)
    assert results["shift/all/3/cls/NLL"] == pytest.approx(np.mean(values[1:], axis=0)[1], rel=1e-5)
    assert results["shift/cls/Acc"] == pytest.approx(np.mean(values, axis=0)[0], rel=1e-5)
    assert "ood/noise/energy/AUROC" in results
    assert not any(key.startswith("ood/set") for key in results)


def test_names_of_shifts_that_do_not_fit_the_loaders_are_rejected(task, toy, quiet_trainer):
    data = Shifted(toy)
    data.shift_names = data.shift_names[:2]
    with pytest.raises(
        HyperparameterError,
        match=r"ood_names is \['noise'\] and shift_names is \[\('fog', 1\), \('fog', 3\)\], but .* returns 4 sets",
    ):
        quiet_trainer().test(task, datamodule=data, verbose=False)


def test_targets_of_shifted_copies_are_checked(task, toy, quiet_trainer):
    data = Shifted((toy[0], torch.full((30,), 3)))
    data.ood_names = ()
    data.test_dataloader = lambda: [loader(*toy), *(loader(x, data.targets) for x in data.shifted())]
    with pytest.raises(HyperparameterError, match=r"targets \[3\], but num_classes=3 allows 0 to 2"):
        quiet_trainer().test(task, datamodule=data, verbose=False)


def test_steps_return_logits_and_targets_for_callbacks(task, toy, quiet_trainer):
    class Keep(Callback):
        def __init__(self):
            self.seen = []

        def on_validation_batch_end(self, trainer, pl_module, outputs, *rest):
            self.seen.append(outputs)

        def on_test_batch_end(self, trainer, pl_module, outputs, *rest):
            self.seen.append(outputs)

    for stage, extra in (("validate", set()), ("test", {"set"})):
        keep = Keep()
        getattr(quiet_trainer(keep), stage)(task, loader(*toy), verbose=False)
        assert all(set(each) == {"outputs", "targets"} | extra for each in keep.seen)
        logits = torch.cat([each["outputs"] for each in keep.seen], dim=1)
        torch.testing.assert_close(logits, task(toy[0]).unsqueeze(0).detach())
        assert torch.equal(torch.cat([each["targets"] for each in keep.seen]), toy[1])


def test_a_checkpoint_loads_safely_and_as_an_ordinary_module(task, toy, quiet_trainer, tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(task, loader(*toy), loader(*toy))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert set(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]) == {
        f"model.{name}" for name in task.model.state_dict()
    }
    again = BayesClassifier.load_from_checkpoint(tmp_path / "last.ckpt", model=MLP(4, 3), num_classes=3)
    torch.testing.assert_close(again(toy[0]), task(toy[0]))


def test_16_bit_logits_are_scored_in_32_bits(toy, quiet_trainer):
    task = BayesClassifier(MLP(4, 3), num_classes=3)
    exact = log_loss(toy[1], task(toy[0]).double().softmax(-1).detach())
    (results,) = quiet_trainer(precision="bf16-mixed").test(task, loader(*toy), verbose=False)
    assert results["test/cls/NLL"] == pytest.approx(exact, rel=0.02)
    assert task.test_metrics["cls/NLL"].dtype == torch.float32


def test_has_the_stated_link():
    assert BayesClassifier.lightning_bayes_link == "softmax"


def test_fewer_than_two_classes_are_rejected():
    with pytest.raises(HyperparameterError, match="num_classes=1, but needs at least 2"):
        BayesClassifier(MLP(4, 1), num_classes=1)


def test_a_network_with_a_different_number_of_logits_is_rejected(toy):
    task = BayesClassifier(MLP(4, 5), num_classes=3)
    with pytest.raises(
        ShapeError, match=r"MLP returned shape \[30, 5\] for 30 inputs, but num_classes=3 requires \[30, 3\]"
    ):
        task.training_step(toy, 0)


@pytest.mark.parametrize(("target", "shown"), [(3, r"\[3\]"), (-1, r"\[-1\]")])
@pytest.mark.parametrize("step", ["training_step", "validation_step", "test_step"])
def test_a_target_outside_the_classes_is_rejected(task, step, target, shown):
    batch = torch.zeros(2, 4), torch.tensor([0, target])
    with pytest.raises(HyperparameterError, match=f"targets {shown}, but num_classes=3 allows 0 to 2"):
        getattr(task, step)(batch, 0)


@pytest.mark.parametrize(
    "targets",
    [torch.zeros(2), torch.eye(3, dtype=torch.long)[:2], torch.tensor([True, False])],
    ids=["float", "one-hot", "bool"],
)
def test_targets_that_are_not_indices_are_rejected(task, targets):
    with pytest.raises(ShapeError, match=r"must be class indices.*but are torch\.(float32|int64|bool) of shape \[2"):
        task.training_step((torch.zeros(2, 4), targets), 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_integers_of_any_type_are_class_indices(task, toy, quiet_trainer, dtype):
    inputs, targets = toy
    expected = F.cross_entropy(task(inputs), targets).item()
    narrow = loader(inputs, targets.to(dtype), batch_size=30)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(task, narrow, narrow)
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(
        expected, rel=1e-5
    )  # with the weights before the step
    (results,) = quiet_trainer().test(task, narrow, verbose=False)
    assert results["test/cls/NLL"] == pytest.approx(F.cross_entropy(task(inputs), targets).item(), rel=1e-5)


def logged_on_ranks(rank, world_size):
    torch.manual_seed(0)
    task, (inputs, targets) = BayesClassifier(MLP(4, 3), num_classes=3), toy_data()
    devices = {"devices": 2, "strategy": "ddp"} if world_size == 2 else {"devices": 1}
    trainer = tiny_training.quiet_trainer(**devices)
    rows = trainer.test(task, datamodule=Shifted((inputs, targets)), verbose=False)
    return {key: value for row in rows for key, value in row.items()}


@pytest.mark.ddp
def test_two_ranks_log_what_one_process_logs(tmp_path):
    expected = logged_on_ranks(0, 1)
    assert {"ood/noise/energy/AUROC", "shift/all/3/cal/ECE"} <= set(expected)
    for found in run_on_ranks(logged_on_ranks, 2, tmp_path, 2):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
