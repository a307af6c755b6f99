"""The demo, shortened: what it prints and writes, with metrics checked by scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from lightning_bayes import demo, load_posterior

# Two epochs, in a folder that no logger writes to.
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


def test_demo_prints_one_table_and_writes_what_it_names(tmp_path, capsys):
    demo.main(["--root", str(tmp_path), "--epochs", "2"])
    printed = capsys.readouterr().out
    for word in ("Adam", "VOGN mean", "VOGN MC (64)", "parameters of VOGN's posterior", *demo.COLUMNS):
        assert word in printed
    for name in ("reliability.png", "entropy.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 300
            assert np.asarray(picture.convert("L")).std() > 10  # something is drawn
    for written in ("vogn/checkpoints/last.ckpt", "vogn/config.yaml"):
        assert (tmp_path / written).is_file()
    assert {"model.conv1.weight", "model.fc3.bias"} <= load_posterior(
        tmp_path / "vogn" / "checkpoints" / "last.ckpt"
    ).mean.keys()


def test_metrics_of_the_table_are_scikit_learn_s(tmp_path):
    results, _, vogn = demo.compare(tmp_path, overrides=["--trainer.max_epochs=2"])
    targets = vogn.data.test_set.tensors[1].numpy()
    for result in results.values():
        probs = (result.probs.double() / result.probs.double().sum(1, keepdim=True)).numpy()
        assert result.metrics["cls/Acc"] == pytest.approx(accuracy_score(targets, probs.argmax(1)))
        assert result.metrics["cls/NLL"] == pytest.approx(log_loss(targets, probs, labels=range(10)), rel=1e-4)
        scores = torch.cat([torch.special.entr(p).sum(1) for p in (result.probs, *result.ood_probs)])
        is_ood = np.arange(len(scores)) >= len(targets)
        assert result.metrics["ood/AUROC"] == pytest.approx(roc_auc_score(is_ood, scores), abs=1e-4)


@pytest.mark.slow
def test_default_arguments_keep_their_promises_over_five_seeds():
    from benchmarks.demo_seeds import collect, criteria

    assert all(criteria(collect(range(5))).values())
