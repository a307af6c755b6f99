"""Validation, test and prediction under the posterior, against an explicit loop over the same samples."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from posterior_around import outputs_of_samples
from tiny_training import RecordingClassifier, quiet_trainer
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback
from lightning_bayes.callbacks.evaluation.evaluated_posterior import sample_count
from lightning_bayes.errors import HyperparameterError, ShapeError, UnsupportedTrainingError

S = 6
# One module serves fit, validate and test; most fits here validate nothing.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


class Net(RecordingClassifier):
    """Steps call self(x), as Lightning's own examples do."""

    def __init__(self, outputs=3, loss=F.cross_entropy, link=None):
        net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, outputs))
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), lr=0.05), net, loss)
        self.lightning_bayes_link = link


def squares(output, y):
    return F.mse_loss(output[:, 0], y.float())


def loader(batch_size=8):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 2, generator=generator), torch.randint(3, (24,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def trainer(*callbacks, **options):
    return quiet_trainer(*callbacks, **{"num_sanity_val_steps": 0, "max_epochs": 2, **options})


def vogn(**arguments):
    return VOGNCallback(**{"eval_samples": S, "seed": 5, "relative_noise": 0.5, **arguments})


def fitted(callback=None, net=None, **options):
    """A trained module, its callback and its trainer."""
    callback, net = callback or vogn(), net or Net()
    host = trainer(callback, **options)
    host.fit(net, loader())
    net.seen.clear()
    return net, callback, host


def by_hand(net, posterior, x, count=S, seed=5):
    """Outputs [S, B, …] under each sample, in evaluation mode."""
    return torch.stack(outputs_of_samples(net, posterior, x, count, seed))


@torch.no_grad()
def at_the_mean(net):
    net.eval()
    return net(data()[0])


def data():
    return loader().dataset.tensors


def test_test_loss_is_the_cross_entropy_of_the_averaged_probability():
    net, callback, host = fitted()
    (result,) = host.test(net, loader(), verbose=False)
    x, y = data()
    probs = by_hand(net, callback.optimizer.posterior(), x).softmax(-1).mean(0)
    torch.testing.assert_close(torch.cat(net.seen).softmax(-1), probs)
    assert result["loss"] == pytest.approx(F.nll_loss(probs.log(), y).item(), rel=1e-5)
    gibbs = torch.stack([F.cross_entropy(o, y) for o in by_hand(net, callback.optimizer.posterior(), x)]).mean()
    mean = F.cross_entropy(at_the_mean(net), y)
    assert abs(result["loss"] - gibbs) > 1e-3  # not the average loss of the samples
    assert abs(result["loss"] - mean) > 1e-4  # nor the loss of the mean


def test_every_way_to_evaluate_gives_the_same_value(tmp_path):
    """validate, test and predict; right after fit, and in a fresh trainer and module from the file."""
    net, _, host = fitted()
    host.save_checkpoint(tmp_path / "last.ckpt")
    values = [
        host.validate(net, loader(), verbose=False)[0]["loss"],
        host.test(net, loader(), verbose=False)[0]["loss"],
    ]
    probs = [torch.cat([p["probs"] for p in host.predict(net, loader())])]
    for _ in range(2):
        fresh, other = trainer(vogn()), Net()
        path = {"ckpt_path": tmp_path / "last.ckpt"}
        values.append(fresh.validate(other, loader(), verbose=False, **path)[0]["loss"])
        values.append(fresh.test(other, loader(batch_size=24), verbose=False, **path)[0]["loss"])
        probs.append(torch.cat([p["probs"] for p in fresh.predict(other, loader(), **path)]))
    assert values == pytest.approx([values[0]] * 6, rel=1e-6)
    torch.testing.assert_close(probs[1], probs[0], rtol=0, atol=0)
    torch.testing.assert_close(probs[2], probs[0], rtol=0, atol=0)


@pytest.mark.parametrize(("arguments", "count"), [({}, 3), ({"val_samples": S}, S), ({"eval_samples": 2}, 2)])
def test_validation_during_fit_is_averaged_over_a_few_samples_of_the_posterior_of_the_moment(arguments, count):
    class Check(Callback):
        checked = 0

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            found = pl_module.seen[-1].softmax(-1)
            forward = pl_module.__dict__.pop("forward")  # the module's own forward
            probs = by_hand(pl_module, callback.optimizer.posterior(), batch[0], count).softmax(-1).mean(0)
            pl_module.forward = forward
            torch.testing.assert_close(found, probs)
            self.checked += 1

    callback, check = vogn(**arguments), Check()
    trainer(callback, check).fit(Net(), loader(), loader())
    assert check.checked == 6


def test_the_sanity_check_runs_the_module_alone():
    calls = []

    class Counting(Net):
        def forward(self, x):
            calls.append(self.trainer.sanity_checking)
            return super().forward(x)

    trainer(vogn(), num_sanity_val_steps=2, max_epochs=1).fit(Counting(), loader(), loader())
    assert calls.count(True) == 2  # one forward for each of the two batches
    assert calls.count(False) == 3 + 3 * (3 + 1)  # in the last epoch, validation also runs at the mean


def test_validation_in_a_fit_takes_fewer_samples_than_a_test():
    host = trainer()
    assert sample_count(host, eval_samples=4, stated=0) == 4
    host.state.fn, host.validating = "fit", True
    assert sample_count(host, eval_samples=4, stated=0) == 0
    assert sample_count(host, eval_samples=4, stated=None) == 3
    host.training = True  # the end of a training epoch, where a fit chooses the width of its posterior
    assert sample_count(host, eval_samples=4, stated=0) == 4


def test_prediction_without_a_predict_step_tells_probabilities_and_uncertainty():
    net, callback, host = fitted()
    predictions = host.predict(net, loader())
    assert all(set(p) == {"probs", "entropy", "mutual_information"} for p in predictions)
    x, _ = data()
    each = by_hand(net, callback.optimizer.posterior(), x)
    total = Categorical(probs=each.softmax(-1).mean(0)).entropy()
    truth = {
        "probs": each.softmax(-1).mean(0),
        "entropy": total,
        "mutual_information": total - Categorical(logits=each).entropy().mean(0),
    }
    for key, expected in truth.items():
        torch.testing.assert_close(torch.cat([p[key] for p in predictions]), expected, rtol=1e-4, atol=1e-6)


def test_prediction_takes_batches_that_are_only_inputs():
    net, _, host = fitted()
    (x, _), inputs = data(), DataLoader(data()[0], batch_size=24)
    whole = torch.cat([p["probs"] for p in host.predict(net, loader())])
    torch.testing.assert_close(host.predict(net, inputs)[0]["probs"], whole)
    assert whole.shape == (len(x), 3)


def test_a_predict_step_of_ones_own_is_kept(caplog):
    class Own(Net):
        def predict_step(self, batch, batch_idx):
            return self(batch[0]).argmax(-1)

    net, callback, host = fitted(net=Own())
    found = torch.cat(host.predict(net, loader()))
    assert (
        caplog.text.count("Own.predict_step returns a Tensor, which holds averages over samples and no uncertainty")
        == 1
    )
    votes = by_hand(net, callback.optimizer.posterior(), data()[0]).argmax(-1)
    counts = (votes[..., None] == torch.arange(3)).sum(0)
    assert torch.equal(counts.gather(1, found[:, None])[:, 0], counts.amax(1))


def test_a_dictionary_of_ones_own_predict_step_gets_the_uncertainty():
    class Own(Net):
        def predict_step(self, batch, batch_idx):
            return {"class": self(batch[0]).argmax(-1)}

    net, callback, host = fitted(net=Own())
    found = host.predict(net, loader())
    each = by_hand(net, callback.optimizer.posterior(), data()[0])
    total = Categorical(probs=each.softmax(-1).mean(0)).entropy()
    assert set(found[0]) == {"class", "class_share", "entropy", "mutual_information"}
    shares = (each.argmax(-1)[..., None] == torch.arange(3)).float().mean(0)
    classes, share = (torch.cat([f[name] for f in found]) for name in ("class", "class_share"))
    torch.testing.assert_close(share, shares.amax(1))
    torch.testing.assert_close(shares.gather(1, classes[:, None])[:, 0], share)
    torch.testing.assert_close(torch.cat([f["entropy"] for f in found]), total, rtol=1e-4, atol=1e-6)


def test_entries_of_a_dictionary_are_the_arguments_of_forward():
    net, callback, host = fitted()
    x, y = data()
    (name,) = inspect.signature(net.forward).parameters
    named = DataLoader([{name: one, "label": label} for one, label in zip(x, y, strict=True)], batch_size=12)
    found = torch.cat([f["probs"] for f in host.predict(net, named)])
    torch.testing.assert_close(found, by_hand(net, callback.optimizer.posterior(), x).softmax(-1).mean(0))


def test_a_batch_that_forward_cannot_take_asks_for_a_predict_step():
    net, callback, host = fitted()
    x, y = data()
    named = DataLoader([{"inputs": one, "label": label} for one, label in zip(x, y, strict=True)], batch_size=12)
    message = (
        r"the whole batch, a dict with the keys inputs, label, and failed: .*"
        r"Define Net\.predict_step\(self, batch, batch_idx\)"
    )
    with pytest.raises(UnsupportedTrainingError, match=message):
        host.predict(net, named)
    assert not {"forward", "predict_step"} & set(vars(net))  # no patch remains
    net.predict_step = lambda batch, batch_idx: {"logits": net(batch["inputs"])}
    mixture = by_hand(net, callback.optimizer.posterior(), x).softmax(-1).mean(0)
    found = torch.cat([each["logits"] for each in host.predict(net, named)])
    torch.testing.assert_close(found.exp(), mixture)


def test_prediction_of_a_regression_tells_mean_and_variance():
    net, callback, host = fitted(net=Net(1, squares, "identity"))
    predictions = host.predict(net, loader())
    each = by_hand(net, callback.optimizer.posterior(), data()[0])
    torch.testing.assert_close(torch.cat([p["mean"] for p in predictions]), each.mean(0))
    torch.testing.assert_close(torch.cat([p["variance"] for p in predictions]), each.var(0, correction=0))


def test_the_callbacks_link_comes_before_the_modules():
    def loss(output, y):
        return F.binary_cross_entropy_with_logits(output[:, 0], (y > 0).float())

    net, callback, host = fitted(vogn(link="sigmoid"), Net(1, loss, "identity"))
    host.test(net, loader(), verbose=False)
    each = by_hand(net, callback.optimizer.posterior(), data()[0])
    torch.testing.assert_close(torch.cat(net.seen), each.sigmoid().mean(0).logit(), rtol=1e-4, atol=1e-5)


LINKS = {  # the average of the outputs by training loss, for a module without link
    "mse_loss": (lambda o, y: F.mse_loss(o, F.one_hot(y, 3).float()), lambda e: e.mean(0)),
    "bce_with_logits": (
        lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, 3).float(), reduction="none").sum(1).mean(),
        lambda e: e.sigmoid().mean(0).logit(),
    ),
    "cross_entropy": (F.cross_entropy, lambda e: e.softmax(-1).mean(0).log()),
    "two links": (
        lambda o, y: F.cross_entropy(o, y) + F.mse_loss(o, torch.zeros_like(o)),
        lambda e: e.mean(0),
    ),
}


@pytest.mark.parametrize("name", LINKS)
def test_without_a_link_the_training_loss_tells_it_also_in_another_process(name, tmp_path):
    loss, average = LINKS[name]
    net, callback, host = fitted(net=Net(loss=loss))
    expected = average(by_hand(net, callback.optimizer.posterior(), data()[0]))
    host.test(net, loader(), verbose=False)
    torch.testing.assert_close(torch.cat(net.seen), expected, rtol=1e-4, atol=1e-5)
    host.save_checkpoint(tmp_path / "last.ckpt")
    fresh = Net(loss=loss)
    trainer(vogn()).test(fresh, loader(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    torch.testing.assert_close(torch.cat(fresh.seen), expected, rtol=1e-4, atol=1e-5)


def test_an_unknown_link_is_named():
    with pytest.raises(HyperparameterError, match="link='probit' is unknown"):
        VOGNCallback(link="probit")
    with pytest.raises(
        HyperparameterError, match=r"lightning_bayes_link='logit' is unknown. Use 'classification', 'bin"
    ):
        fitted(net=Net(link="logit"))


def test_one_output_under_softmax_is_refused_and_not_averaged_to_a_constant():
    net, _, host = fitted(net=Net(1, lambda f, y: squares(f, y) + 0 * f.square().mean(), "softmax"))  # an unknown loss
    with pytest.raises(ShapeError, match=r"For one logit per label, use link='binary'; for values"):
        host.test(net, loader(), verbose=False)


def test_a_stated_link_that_contradicts_the_loss_is_refused_with_both():
    with pytest.raises(HyperparameterError, match=r"Categorical.* contradicts that of the training loss, Gaussian\(\)"):
        fitted(net=Net(1, squares, "softmax"))


def test_a_forward_of_the_instances_own_comes_back():
    net = Net()
    replaced = net.forward = lambda x: 2 * net.net(x)
    net, callback, host = fitted(net=net)
    host.test(net, loader(), verbose=False)
    assert vars(net)["forward"] is replaced
    probs = by_hand(net, callback.optimizer.posterior(), data()[0]).softmax(-1).mean(0)
    torch.testing.assert_close(torch.cat(net.seen).softmax(-1), probs)


def test_an_exception_inside_a_sampled_forward_gives_the_weights_back():
    class Breaking(Net):
        calls = 0

        def forward(self, x):
            self.calls += not self.training
            if self.calls == 3:
                raise ValueError("broken")
            return super().forward(x)

    net, _, host = fitted(net=Breaking())
    before = {n: v.clone() for n, v in net.state_dict().items()}
    with pytest.raises(ValueError, match="broken"):
        host.test(net, loader(), verbose=False)
    assert net.calls == 3
    assert "forward" not in vars(net)
    assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())


def test_steps_that_bypass_forward_are_warned_about():
    class Bypass(Net):
        def test_step(self, batch, batch_idx):
            self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    net, _, host = fitted(net=Bypass())
    match = r"Bypass's steps did not call self\(\.\.\.\).*results use the module's current weights"
    with pytest.warns(UserWarning, match=match):
        host.test(net, loader(), verbose=False)


def test_a_forward_that_calls_itself_is_sampled_once():
    class Recursive(Net):
        def forward(self, x, again=True):
            return 2 * self(x, again=False) if again else self.net(x)

    net, callback, host = fitted(net=Recursive())
    host.test(net, loader(), verbose=False)
    probs = by_hand(net, callback.optimizer.posterior(), data()[0]).softmax(-1).mean(0)
    torch.testing.assert_close(torch.cat(net.seen).softmax(-1), probs)


def evaluated_at_the_mean(net, host, match, **options):
    net.seen.clear()
    with pytest.warns(UserWarning, match=match):
        host.test(net, loader(), verbose=False, **options)
    torch.testing.assert_close(torch.cat(net.seen), at_the_mean(net), rtol=1e-5, atol=1e-6)


def test_without_a_posterior_the_mean_is_evaluated_with_a_warning():
    match = "VOGNCallback evaluates at the module's current weights: no posterior was trained or loaded.*ckpt_path"
    evaluated_at_the_mean(Net(), trainer(vogn()), match)


def test_weights_that_changed_after_the_fit_are_evaluated_with_a_warning():
    net, _, host = fitted()
    with torch.no_grad():
        net.net[0].bias += 1
    evaluated_at_the_mean(net, host, "they are not the mean of its posterior")


# Lightning 2.6 warns that the file was written with callbacks that this trainer lacks, and the other way round.
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_checkpoint_of_weights_only_is_evaluated_with_a_warning(tmp_path):
    _, _, host = fitted()
    host.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    match = "no posterior was trained or loaded"
    evaluated_at_the_mean(Net(), trainer(vogn()), match, ckpt_path=tmp_path / "weights.ckpt")


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_checkpoint_of_a_plain_run_is_evaluated_with_a_warning(tmp_path):
    plain = trainer()
    plain.fit(Net(), loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    match = r"VOGNCallback evaluates at the module's current weights: The checkpoint holds no posterior"
    evaluated_at_the_mean(Net(), trainer(vogn()), match, ckpt_path=tmp_path / "plain.ckpt")
