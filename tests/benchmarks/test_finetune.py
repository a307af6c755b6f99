"""The fine-tuning benchmark on twenty images: its data, its methods, its scores and its table."""

from __future__ import annotations

import gzip
import json
import re
import struct
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from fake_images import write_idx_sets
from sklearn.metrics import log_loss, roc_auc_score
from torch.distributions import Categorical

from benchmarks.finetune.__main__ import HEAD, METHODS, PEER, main, pretrain, scores, table
from benchmarks.finetune.data import Images, digits, target
from lightning_bayes.errors import DatasetError, HyperparameterError

LETTERS = 40
NAMES = ("FashionMNIST", "notMNIST")


def write_letters(root):
    """Forty letters: image i is filled with i and is of class i modulo 10."""
    (root / "notMNIST").mkdir()
    ids = np.arange(LETTERS, dtype=np.uint8)
    images = np.broadcast_to(ids[:, None, None], (LETTERS, 28, 28))
    for name, array in (("images-idx3", images), ("labels-idx1", ids % 10)):
        header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        packed = gzip.compress(header + np.ascontiguousarray(array).tobytes())
        (root / "notMNIST" / f"t10k-{name}-ubyte.gz").write_bytes(packed)


@pytest.fixture
def root(tmp_path):
    write_idx_sets(tmp_path)
    write_letters(tmp_path)
    return tmp_path


def asked(root, *more):
    start = ["--root", str(root), "--seeds", "1", "--pretrain-epochs", "1", "--epochs", "1", "--shots", "1"]
    return [*start, "--json", str(root / "r.json"), *more]


def grey(images):
    """The grey value that fills each image."""
    return ((images.x[:, 0, 0, 0] * 0.3081 + 0.1307) * 255).round().long()


@pytest.mark.parametrize("validate", [False, True])
def test_no_letter_is_both_learned_and_tested(root, validate):
    found = target("notMNIST", root, seed=0, validate=validate, shots=1)
    assert found.train.y.tolist() == list(range(10))
    assert torch.equal(grey(found.train) % 10, found.train.y)
    assert torch.equal(grey(found.test) % 10, found.test.y)
    assert not set(grey(found.train).tolist()) & set(grey(found.test).tolist())


def test_clothes_are_tested_on_the_published_test_set(root):
    found = target("FashionMNIST", root, seed=0, shots=1)
    assert grey(found.test).tolist() == list(range(100, 110))
    assert max(grey(found.train)) < 20


def test_missing_letters_are_named_with_the_way_out(tmp_path):
    message = r"t10k-images-idx3-ubyte\.gz and .* are missing\. .* pass --targets FashionMNIST"
    with pytest.raises(DatasetError, match=message):
        target("notMNIST", tmp_path, seed=0)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_predicts_probabilities(root, method):
    if method == PEER and find_spec("laplace") is None:
        pytest.skip("laplace-torch is not installed")
    weights = pretrain(digits(root), seed=0, epochs=1)
    images = target("FashionMNIST", root, seed=0, shots=2)
    probs = METHODS[method][1](weights, images.train, 0, 1)(images.test.x)
    assert probs.shape == (10, 10)
    torch.testing.assert_close(probs.sum(1), torch.ones(10))
    assert (probs >= 0).all()


def test_the_last_layer_is_what_its_pattern_matches(root):
    names = [f"model.{name}" for name in pretrain(digits(root), seed=0, epochs=1)]
    assert [name for name in names if re.search(HEAD, name)] == ["model.fc3.weight", "model.fc3.bias"]


def test_scores_are_those_of_scikit_learn(generator):
    logits = {size: torch.randn(size, 10, generator=generator, dtype=torch.float64) for size in (60, 40)}
    targets = torch.randint(10, (60,), generator=generator)

    def predict(images):
        return logits[len(images)].softmax(-1)

    found = scores(predict, Images(torch.zeros(60, 1), targets), {"ood_auroc": torch.zeros(40, 1)})
    probs = predict(torch.zeros(60))
    uncertain = torch.cat([Categorical(predict(torch.zeros(size))).entropy() for size in (60, 40)])
    assert found["nll"] == pytest.approx(log_loss(targets, probs, labels=list(range(10))))
    assert found["accuracy"] == pytest.approx(float((probs.argmax(1) == targets).double().mean()))
    assert found["ood_auroc"] == pytest.approx(roc_auc_score([0] * 60 + [1] * 40, uncertain), abs=1e-6)


def test_the_command_keeps_what_it_measured_and_repeats_nothing(root, capsys):
    main(asked(root, "--methods", "adam", "--targets", "notMNIST"))
    first = json.loads((root / "r.json").read_text("utf-8"))["runs"]
    main(asked(root, "--methods", "adam", "vogn_initial"))
    second = json.loads((root / "r.json").read_text("utf-8"))["runs"]
    assert second[0] == first[0]
    assert [(run["target"], run["method"]) for run in second[1:]] == [
        ("FashionMNIST", "adam"),
        ("FashionMNIST", "vogn_initial"),
        ("notMNIST", "vogn_initial"),
    ]
    capsys.readouterr()
    main(asked(root, "--table"))
    assert capsys.readouterr().out.strip().endswith(table(second))  # after a remark where laplace-torch is missing


def test_runs_of_other_epochs_are_not_mixed(root):
    (root / "r.json").write_text(json.dumps({"epochs": 20, "shots": 1, "runs": []}))
    with pytest.raises(HyperparameterError, match=r"has runs with epochs=20 \(requested: 1\)\. Choose another file"):
        main(asked(root))
