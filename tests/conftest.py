"""What every test starts from: one thread, a fixed seed, and no GPU test without a GPU."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the processes that tests spawn
os.environ.setdefault("MPLBACKEND", "Agg")  # figures are written, never shown

import pytest
import torch

torch.set_num_threads(1)  # sums keep one order, and small tensors are faster without threads


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch finds no accelerator on this machine"))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _global_torch_state():
    """A test that changes the global seed or dtype does not change the next one."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def _seed_variables(monkeypatch):
    """Lightning's environment variables are restored, because processes of later tests would read them."""
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "0")


@pytest.fixture
def _sigint():
    """Lightning ignores SIGINT from the first Ctrl-C on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def same_labels(monkeypatch):
    """Both engines "draw" the labels that the test says."""
    from lightning_bayes.likelihood import (
        Categorical,  # not before it is needed: an import of the package takes seconds
    )

    def fix(labels):
        monkeypatch.setattr(Categorical, "sample", lambda self, outputs, generator: labels)
        monkeypatch.setattr(torch.distributions.Categorical, "sample", lambda self, shape: labels.expand(*shape, -1))

    return fix
