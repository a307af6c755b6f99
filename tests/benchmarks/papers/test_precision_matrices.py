"""Figure 1: dense precisions against those that a posterior states, the exact one against autograd, and a tiny run."""

from __future__ import annotations

import json

import numpy as np
import torch

from benchmarks.papers import precision_matrices as command
from lightning_bayes.posteriors import MatrixGaussian, MeanField


def test_a_dense_precision_is_the_one_that_the_posterior_states(generator):
    mean = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    prior = dict.fromkeys(mean, 1.0)
    stated = {name: torch.rand(value.shape, generator=generator) + 0.5 for name, value in mean.items()}
    found = command.dense_precision(MeanField(mean, stated, prior, 10))
    expected = torch.diag(torch.cat([stated["weight"].flatten(), stated["bias"]])).double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    roots = (torch.rand(side, side, generator=generator) for side in (2, 3))
    left, right = (root @ root.mT + torch.eye(len(root)) for root in roots)
    weight = {"w": torch.zeros(2, 3)}
    kronecker = MatrixGaussian(
        mean=weight, factors={"w": (left, right)}, biases={}, precision={}, prior_precision={"w": 1.0}, num_data=10
    )
    torch.testing.assert_close(
        command.dense_precision(kronecker), torch.kron(left, right).double(), atol=1e-4, rtol=1e-4
    )


def test_the_exact_precision_sums_outer_products_of_gradients(generator):
    torch.manual_seed(0)
    model, inputs = command.network(3, 2), torch.randn(5, 3, generator=generator)
    expected = torch.eye(sum(param.numel() for param in model.parameters())).double()
    for row in inputs:
        gradient = torch.autograd.grad(model(row)[0], list(model.parameters()))
        flat = torch.cat([part.flatten() for part in gradient]).double()
        expected += 3.0 * torch.outer(flat, flat)
    torch.testing.assert_close(command.exact_precision(model, inputs, 3.0), expected, atol=1e-5, rtol=1e-5)


def test_a_normalised_precision_has_a_unit_diagonal(generator):
    roots = torch.randn(6, 6, generator=generator)
    shown = command.normalised(roots @ roots.mT)
    torch.testing.assert_close(shown.diagonal(), torch.ones(6))
    assert shown.max() < 1 + 1e-5  # Cauchy and Schwarz


def test_a_tiny_run_trains_draws_and_keeps_all_four_posteriors(tmp_path, capsys):
    generator = np.random.default_rng(0)
    data = generator.normal(size=(40, 4))
    rows = {"train_0": np.arange(36), "test_0": np.arange(36, 40)}
    np.savez(tmp_path / "bostonHousing.npz", data=data, index_features=[0, 1, 2], index_target=3, n_splits=1, **rows)
    plot, result = tmp_path / "p.png", tmp_path / "p.json"
    arguments = ["--epochs", "2", "--width", "3", "--plot", str(plot), "--json", str(result)]
    command.main(["--root", str(tmp_path), *arguments])
    found = json.loads(result.read_text())["results"]
    assert list(found) == list(command.METHODS)
    assert all(np.isfinite(list(scores.values())).all() for scores in found.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(capsys.readouterr().out.splitlines()) == 4
