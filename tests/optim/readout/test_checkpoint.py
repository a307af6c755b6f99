"""Loading posteriors from checkpoints of training runs, and errors for other files."""

from __future__ import annotations

import pickle

import pytest
import torch
from tiny_training import NormedClassifier, loader, quiet_trainer

from lightning_bayes import OGNCallback, VOGNCallback
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim.readout import load_posterior, posterior_from_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


def decayed_head(module):
    parts = {"params": [*module.net[3:].parameters()], "weight_decay": 0.01}, {"params": [*module.net[:3].parameters()]}
    return torch.optim.Adam(parts, lr=0.01)


def fitted(tmp_path, *callbacks, net=None, **options):
    net = NormedClassifier() if net is None else net
    net.configure = decayed_head
    trainer = quiet_trainer(*callbacks, max_epochs=2, **options)
    trainer.fit(net, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return net, tmp_path / "last.ckpt"


@pytest.mark.parametrize("arguments", [{}, {"init_precision": 500.0, "kl_warmup_steps": 20, "damping": 0.1}])
def test_the_file_holds_the_posterior_that_training_left(tmp_path, arguments):
    callback = VOGNCallback(num_data=24, **arguments)
    net, path = fitted(tmp_path, callback)
    loaded, truth = load_posterior(path), callback.optimizer.posterior()
    assert set(loaded.mean) == {name for name, _ in net.named_parameters() if not name.startswith("net.1.")}  # the norm
    for part in ("mean", "precision", "constants"):
        assert getattr(loaded, part).keys() == getattr(truth, part).keys()
        for name, value in getattr(truth, part).items():
            assert torch.equal(getattr(loaded, part)[name], value), (part, name)
    assert loaded.prior_precision == truth.prior_precision
    assert loaded.num_data == truth.num_data == 24


def test_precision_and_prior_follow_the_parameters_own_group(tmp_path):
    """L2 penalty 0.01 in the first group only: δ = N·wd = 0.48 there and 1 elsewhere; P = N s + δ without a floor."""
    callback = VOGNCallback(lr=0.001)
    net, path = fitted(tmp_path, callback)
    loaded = load_posterior(path)
    assert loaded.prior_precision["net.3.weight"] == pytest.approx(0.48)
    assert loaded.prior_precision["net.0.weight"] == 1.0
    for name in ("net.3.weight", "net.0.weight"):
        curvature = callback.optimizer.state[net.get_parameter(name)]["curvature"]
        torch.testing.assert_close(loaded.precision[name], 48 * curvature + loaded.prior_precision[name])


@pytest.mark.parametrize("init_precision", [None, 500.0])
def test_frozen_parameters_are_constants(tmp_path, init_precision):
    """A frozen layer in the optimizer has no curvature; read as a posterior it would have the prior's huge width."""
    callback = VOGNCallback(init_precision=init_precision)
    frozen = NormedClassifier()
    frozen.net[0].requires_grad_(False)
    net, path = fitted(tmp_path, callback, net=frozen)
    loaded = load_posterior(path)
    assert "net.0.weight" not in loaded.mean
    assert torch.equal(loaded.constants["net.0.weight"], net.net[0].weight)
    assert loaded.mean.keys() == callback.optimizer.posterior().mean.keys()


def test_map_location_places_the_tensors(tmp_path):
    _, path = fitted(tmp_path, VOGNCallback())
    assert load_posterior(path, map_location="meta").mean["net.0.weight"].is_meta


def test_extra_state_that_is_no_tensor_is_left_out(tmp_path):
    callback = VOGNCallback()

    class WithExtra(NormedClassifier):
        def get_extra_state(self):
            return {"vocabulary": "abc"}

        def set_extra_state(self, state):
            pass

    _, path = fitted(tmp_path, callback, net=WithExtra())
    assert load_posterior(path).constants.keys() == callback.optimizer.posterior().constants.keys()
    assert "_extra_state" not in load_posterior(path).constants


def test_a_checkpoint_without_the_callback_holds_no_posterior(tmp_path):
    _, path = fitted(tmp_path)
    with pytest.raises(PosteriorError, match=r"last\.ckpt holds no posterior: it was saved without a callback such as"):
        load_posterior(path)


def test_a_weights_only_checkpoint_holds_no_posterior(tmp_path):
    _, path = fitted(tmp_path, VOGNCallback())
    checkpoint = torch.load(path, weights_only=True)
    with pytest.raises(PosteriorError, match=r"^The checkpoint holds no posterior: .*save_weights_only=True"):
        posterior_from_checkpoint({"state_dict": checkpoint["state_dict"]})


def test_ogn_leaves_no_posterior(tmp_path):
    _, path = fitted(tmp_path, OGNCallback())
    with pytest.raises(PosteriorError, match=r"last\.ckpt was saved before the first update .* such as OGN"):
        load_posterior(path)


@pytest.mark.parametrize("init_precision", [None, 500.0])
def test_before_the_first_update_there_is_no_posterior(tmp_path, init_precision):
    _, path = fitted(tmp_path, VOGNCallback(init_precision=init_precision), limit_train_batches=0)
    with pytest.raises(PosteriorError, match=r"holds no posterior|before the first update of the posterior"):
        load_posterior(path)


class Unsafe:
    """A class that safe loading refuses to build."""


@pytest.mark.parametrize(
    "content",
    [
        b"epoch,loss\n1,0.3\n",
        b"\x89PNG\r\n\x1a\n" + bytes(64),
        b"\x80",
        b".",
        pickle.dumps(Unsafe(), 2),
        pickle.dumps([1, 2], 2),
    ],
    ids=["csv", "png", "cut pickle", "empty pickle", "pickled object", "pickled list"],
)
def test_a_foreign_file_is_named(tmp_path, content):
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(
        PosteriorError, match=r"model\.bin (cannot be read|is not a Lightning check|holds an object of)"
    ):
        load_posterior(tmp_path / "model.bin")


@pytest.mark.parametrize("content", [{"weight": torch.ones(2)}, [torch.ones(2)], torch.ones(2)], ids=str)
def test_a_torch_file_without_state_dict_is_no_lightning_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(PosteriorError, match=r"weights\.pt is not a Lightning checkpoint: it has no 'state_dict'"):
        load_posterior(tmp_path / "weights.pt")


def test_a_file_that_is_not_there_is_an_ordinary_file_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        load_posterior(tmp_path / "nowhere.ckpt")
