"""A callback resumes every optimizer of torch and timm exactly that plain Lightning resumes exactly."""

from __future__ import annotations

import pytest
import timm.optim
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import Classifier, loader, mlp, quiet_trainer, weights
from torch import nn

from lightning_bayes import VOGNCallback
from lightning_bayes.errors import UnsupportedTrainingError

REFUSED = {  # before training, with these words
    "LBFGS": "LBFGS calls its closure several times per step",
}
OF_MATRICES = {"Muon"}  # takes no vectors


def of_torch():
    kinds = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    return sorted(
        kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    )


def of_timm():
    """Names of timm's registry, except for optimizers of separate packages."""
    if not hasattr(timm.optim, "list_optimizers"):
        return [pytest.param("timm", marks=pytest.mark.skip(reason="this timm has no list of its optimizers"))]
    own = [name for name in timm.optim.list_optimizers() if not name.startswith(("bnb", "fused"))]
    return [*own, "lookahead_adamw", "lookahead_lamb"]


def torch_optimizer(name):
    return lambda module: getattr(torch.optim, name)(module.parameters(), lr=0.01)


def timm_optimizer(name):
    return lambda module: timm.optim.create_optimizer_v2(list(module.parameters()), opt=name, lr=0.01)


def network(name, seed):
    layers = [nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)]
    if name not in OF_MATRICES:
        return mlp(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in layers[::2]:
            layer.reset_parameters()
    return nn.Sequential(*layers)


def weights_after(name, build, folder, callbacks, resume=None, seed=0):
    """Two epochs with a checkpoint after each."""
    module = Classifier(build, net=network(name, seed))
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    torch.manual_seed(seed)
    quiet_trainer(saving, *callbacks(), max_epochs=2, enable_checkpointing=True).fit(module, loader(), ckpt_path=resume)
    return weights(module)


def is_resumed_exactly(name, build, folder, callbacks):
    whole = weights_after(name, build, folder, callbacks)
    resumed = weights_after(name, build, folder, callbacks, folder / "epoch=0.ckpt", seed=5)
    return all(torch.equal(whole[key], resumed[key]) for key in whole)


def require_exact(name, build, tmp_path):
    try:
        is_exact = is_resumed_exactly(name, build, tmp_path / "plain", list)
    except Exception as error:  # an optimizer may need anything
        pytest.skip(f"plain Lightning does not train with it: {error}"[:160])
    if not is_exact:
        pytest.skip("plain Lightning does not resume it exactly")
    if name in REFUSED:
        with pytest.raises(UnsupportedTrainingError, match=REFUSED[name]):
            weights_after(name, build, tmp_path / "ours", lambda: [VOGNCallback()])
        return
    assert is_resumed_exactly(name, build, tmp_path / "ours", lambda: [VOGNCallback()])


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.slow
@pytest.mark.parametrize("name", of_torch())
def test_of_torch(name, tmp_path):
    require_exact(name, torch_optimizer(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", of_timm())
def test_of_timm(name, tmp_path):
    require_exact(name, timm_optimizer(name), tmp_path)


@pytest.mark.slow
def test_of_transformers(tmp_path):
    optimization = pytest.importorskip("transformers.optimization")
    require_exact(
        "Adafactor",
        lambda module: optimization.Adafactor(module.parameters(), lr=0.01, relative_step=False),
        tmp_path,
    )
