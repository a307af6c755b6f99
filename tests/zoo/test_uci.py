from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_bayes.errors import DatasetError, HyperparameterError
from lightning_bayes.zoo import MLP, BayesRegressor, UCIDataModule
from lightning_bayes.zoo.data.uci import UCI_SETS, Standardiser, read_uci

ROWS, SPLITS = 40, 3


@pytest.fixture
def raw():
    """Columns: a feature, the target, a constant feature, and an unused column."""
    generator = np.random.default_rng(0)
    data = generator.normal(size=(ROWS, 4)) * [2.0, 50.0, 0.0, 1.0] + [1.0, 300.0, 0.1, 0.0]
    orders = [generator.permutation(ROWS) for _ in range(SPLITS)]
    return data, [(order[:36], order[36:]) for order in orders]


@pytest.fixture
def npz_root(tmp_path, raw):
    data, splits = raw
    arrays = {
        f"{part}_{i}": rows for i, pair in enumerate(splits) for part, rows in zip(("train", "test"), pair, strict=True)
    }
    np.savez(tmp_path / "yacht.npz", data=data, index_features=[0, 2], index_target=1, n_splits=SPLITS, **arrays)
    return tmp_path


@pytest.fixture(params=["", "UCI_Datasets"])
def text_root(request, tmp_path, raw):
    data, splits = raw
    folder = tmp_path / request.param / "yacht" / "data"
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", data)
    np.savetxt(folder / "index_features.txt", [0, 2], fmt="%d")
    np.savetxt(folder / "index_target.txt", [1], fmt="%d")
    np.savetxt(folder / "n_splits.txt", [SPLITS], fmt="%d")
    for i, (train, test) in enumerate(splits):
        np.savetxt(folder / f"index_train_{i}.txt", train, fmt="%d")
        np.savetxt(folder / f"index_test_{i}.txt", test, fmt="%d")
    return tmp_path


def assert_is(stored, raw):
    data, splits = raw
    np.testing.assert_allclose(stored.inputs, data[:, [0, 2]])
    np.testing.assert_allclose(stored.targets, data[:, 1])
    assert len(stored.splits) == SPLITS
    for got, expected in zip(stored.splits, splits, strict=True):
        assert [rows.tolist() for rows in got] == [rows.tolist() for rows in expected]


def test_reads_npz_files(npz_root, raw):
    assert_is(read_uci(npz_root, "yacht"), raw)


def test_reads_the_original_text_tree(text_root, raw):
    assert_is(read_uci(text_root, "yacht"), raw)


def test_a_missing_set_lists_the_paths_and_the_available_sets(tmp_path):
    message = rf"set 'wine' is missing: found none of {tmp_path}/wine-quality-red\.npz, .*data\.txt\. .*boston, conc"
    with pytest.raises(DatasetError, match=message):
        read_uci(tmp_path, "wine")


def test_standardisation_is_fitted_on_the_training_rows(npz_root, raw):
    data, splits = raw
    module = UCIDataModule(str(npz_root), "yacht", split=1, batch_size=100, val_share=0.25)
    module.setup("fit")
    (train_x, train_y), (val_x, val_y), (test_x, test_y) = (
        next(iter(loader)) for loader in (module.train_dataloader(), module.val_dataloader(), module.test_dataloader())
    )
    assert (len(train_x), len(val_x), len(test_x)) == (27, 9, 4)
    assert train_x[:, 0].mean().abs() < 1e-6
    assert train_y.mean().abs() < 1e-5
    torch.testing.assert_close(train_x[:, 0].std(correction=0), torch.tensor(1.0))
    torch.testing.assert_close(train_y.std(correction=0), torch.tensor(1.0))
    original = torch.cat([train_y, val_y]).double() * module.target_std + module.target_mean
    np.testing.assert_allclose(sorted(original.tolist()), sorted(data[splits[1][0], 1]), rtol=1e-5)
    np.testing.assert_allclose(test_y * module.target_std + module.target_mean, data[splits[1][1], 1], rtol=1e-5)


def test_a_constant_column_stays_finite():
    values = torch.full((7, 1), 0.1, dtype=torch.float64)
    assert torch.equal(Standardiser.fit(values).std, torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(Standardiser.fit(values).apply(values + 2), torch.full_like(values, 2.0))


def test_a_regressor_reports_in_the_units_of_the_data(npz_root, raw, quiet_trainer):
    """The network predicts zero, the mean of the standardised training targets."""
    data, splits = raw
    train, test = (data[rows, 1] for rows in splits[2])
    task = BayesRegressor(MLP(2, 1), noise_std=0.5)
    torch.nn.init.zeros_(task.model.layers[-1].weight)
    torch.nn.init.zeros_(task.model.layers[-1].bias)
    (results,) = quiet_trainer().test(task, datamodule=UCIDataModule(str(npz_root), "yacht", split=2), verbose=False)
    density = torch.distributions.Normal(float(train.mean()), 0.5 * float(train.std()))
    assert results["test/reg/NLL"] == pytest.approx(-density.log_prob(torch.tensor(test)).mean().item(), rel=1e-5)
    assert results["test/reg/RMSE"] == pytest.approx(float(((test - train.mean()) ** 2).mean() ** 0.5), rel=1e-5)


def test_val_share_0_has_no_validation_rows(npz_root):
    module = UCIDataModule(str(npz_root), "yacht")
    module.setup("fit")
    assert module.val_dataloader() == []
    assert len(module.train_set) == 36


def test_splits_and_fractions_out_of_range_are_rejected(npz_root):
    with pytest.raises(HyperparameterError, match="split=3, but yacht has the splits 0 to 2"):
        UCIDataModule(str(npz_root), "yacht", split=3).setup("fit")
    with pytest.raises(HyperparameterError, match=r"val_share=1\.0 must be at least 0 and below 1"):
        UCIDataModule(val_share=1.0)


@pytest.mark.parametrize("name", UCI_SETS)
def test_the_real_splits_are_partitions(name, real_uci_root):
    stored = read_uci(real_uci_root, name)
    assert len(stored.splits) == (5 if name == "protein" else 20)
    for train, test in stored.splits:
        assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(stored.targets)))
        assert abs(len(test) / len(stored.targets) - 0.1) < 0.01


@pytest.fixture
def real_uci_root(real_root):
    try:
        read_uci(real_root, "yacht")
    except DatasetError:
        pytest.skip("LIGHTNING_BAYES_DATA holds no UCI sets")
    return real_root
