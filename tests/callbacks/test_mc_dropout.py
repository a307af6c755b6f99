"""Monte-Carlo dropout with the user's optimizer, against loops and twins with explicit dropout layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import RecordingClassifier, assert_same_bits, blobs, fit, loader, quiet_trainer, weights
from torch import nn

from lightning_bayes import MCDropoutCallback, VOGNCallback
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.predictive import DropoutSamples, dropout_layers

S = 6
# One module serves fit, validate and test; most fits here validate nothing.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader.")


def network(*dropouts):
    """A network with or without dropout after its two linear layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)]
    if dropouts:
        layers[1:1], layers[5:] = [nn.Dropout(dropouts[0])], [nn.Dropout(dropouts[1])]
    return nn.Sequential(*layers)


def evaluated(module, *callbacks, **loaders):
    module.seen = []
    quiet_trainer(*callbacks).test(module, loader(**loaders), verbose=False)
    return torch.cat(module.seen)


def by_hand(module, batches, seed=0):
    """Averaged probabilities [examples, classes] of S passes with dropout for each batch."""
    module.eval()
    samples, found = DropoutSamples(dropout_layers(module), S, seed), []
    for x, _ in batches:
        with torch.no_grad():
            found.append(samples.outputs(module, lambda x=x: module.net(x)).softmax(-1).mean(0))
    return torch.cat(found)


def test_a_test_is_of_the_averaged_probability_of_passes_with_dropout():
    module = RecordingClassifier(net=network(0.3, 0.2))
    found = evaluated(module, MCDropoutCallback(eval_samples=S, seed=4, link="softmax"))
    torch.testing.assert_close(found.softmax(-1), by_hand(module, loader(), seed=4))
    plain = evaluated(module)
    assert (found.softmax(-1) - plain.softmax(-1)).abs().max() > 0.01


def test_dropout_is_on_in_evaluation_only_when_asked_for():
    module = RecordingClassifier(net=network(0.3, 0.2))
    with torch.no_grad():
        plain = module.net.eval()(blobs().tensors[0])
    torch.testing.assert_close(evaluated(module), plain)
    torch.testing.assert_close(evaluated(module, MCDropoutCallback(eval_samples=0)), plain)


def test_training_is_the_modules_own_bit_for_bit():
    """Validation with dropout does not change the global random state, and so not the training's masks."""
    plain, ours = RecordingClassifier(net=network(0.3, 0.2)), RecordingClassifier(net=network(0.3, 0.2))
    for module, callbacks in ((plain, []), (ours, [MCDropoutCallback(eval_samples=S)])):
        torch.manual_seed(0)
        quiet_trainer(*callbacks, max_epochs=2, num_sanity_val_steps=0).fit(module, loader(), loader())
    assert_same_bits(weights(ours), weights(plain))
    assert not torch.equal(ours.seen[-1], plain.seen[-1])


def test_prediction_tells_probabilities_and_uncertainty():
    module = RecordingClassifier(net=network(0.3, 0.2))
    predictions = quiet_trainer(MCDropoutCallback(eval_samples=S, link="softmax")).predict(module, loader())
    torch.testing.assert_close(torch.cat([p["probs"] for p in predictions]), by_hand(module, loader()))
    assert torch.cat([p["mutual_information"] for p in predictions]).min() > 0


def test_the_training_loss_tells_the_likelihood_also_from_a_checkpoint(tmp_path):
    def loss(output, y):
        return F.mse_loss(output[:, 0], y.float())

    module, fresh = (RecordingClassifier(net=network(0.3, 0.2), loss=loss) for _ in range(2))
    callback, other = MCDropoutCallback(eval_samples=S), MCDropoutCallback(eval_samples=S)
    trainer = fit(module, callback)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    quiet_trainer(other).test(fresh, loader(), verbose=False, ckpt_path=tmp_path / "last.ckpt")
    assert [each.loss_likelihood.only.kind.name for each in (other, callback)] == ["gaussian"] * 2
    samples, module = DropoutSamples(dropout_layers(module), S), module.eval()
    with torch.no_grad():
        means = [samples.outputs(module, lambda x=x: module.net(x)).mean(0) for x, _ in loader()]
    torch.testing.assert_close(torch.cat(fresh.seen), torch.cat(means))


# -- dropout that the callback puts in ------------------------------------------------------------------------------------

BEHIND_LINEAR = {"p": 0.3, "layers": r"net\.(0|3)"}


def test_inserted_dropout_trains_and_tests_as_dropout_layers_in_the_same_places():
    twin, plain = RecordingClassifier(net=network(0.3, 0.3)), RecordingClassifier(net=network())
    results = []
    for module, callback in (
        (twin, MCDropoutCallback(eval_samples=S)),
        (plain, MCDropoutCallback(eval_samples=S, **BEHIND_LINEAR)),
    ):
        torch.manual_seed(0)
        fit(module, callback, max_epochs=2)
        results.append(evaluated(module, callback))
    for a, b in zip(twin.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(results[0], results[1])


def test_a_module_built_in_configure_model_gets_its_dropout():
    class Late(RecordingClassifier):
        def __init__(self) -> None:
            super().__init__(net=nn.Identity())

        def configure_model(self):
            if isinstance(self.net, nn.Identity):
                self.net = network(0.3, 0.2)

    for callback in (MCDropoutCallback(eval_samples=S), MCDropoutCallback(eval_samples=S, **BEHIND_LINEAR)):
        module = Late()
        fit(module, callback)
        averaged, at_mean = evaluated(module, callback), evaluated(module)
        assert not torch.allclose(averaged.softmax(-1), at_mean.softmax(-1), atol=1e-4)


# -- what cannot work -----------------------------------------------------------------------------------------------------


def refused(error, match, module, callback, **options):
    before = weights(module)
    with pytest.raises(error, match=match):
        fit(module, callback, **options)
    assert_same_bits(weights(module), before)
    with pytest.raises(error, match=match):
        quiet_trainer(callback).test(module, loader(), verbose=False)


def test_a_module_without_dropout_is_refused_before_training():
    refused(
        UnsupportedLayerError,
        r"RecordingClassifier has no dropout layer.*or pass p=0\.1 and layers=",
        RecordingClassifier(net=network()),
        MCDropoutCallback(),
    )


def test_a_pattern_that_matches_no_layer_lists_the_layers():
    match = (
        r"layers='conv\.\*' matches no full layer name of RecordingClassifier\. Its layers are net\.0, net\.1, net\.2, "
    )
    refused(UnsupportedLayerError, match, RecordingClassifier(net=network()), MCDropoutCallback(p=0.1, layers="conv.*"))


def test_a_layer_that_returns_no_tensor_is_named():
    class Recurrent(RecordingClassifier):
        def __init__(self) -> None:
            super().__init__(net=nn.ModuleDict({"rnn": nn.GRU(4, 3)}))

        def forward(self, x):
            return self.net["rnn"](x)[0]

    match = r"Dropout cannot follow net\.rnn, which returns a tuple, not a tensor\. Change layers='net\.rnn'"
    with pytest.raises(UnsupportedLayerError, match=match):
        fit(Recurrent(), MCDropoutCallback(p=0.1, layers="net.rnn"))


@pytest.mark.parametrize("callbacks", [[VOGNCallback, MCDropoutCallback], [MCDropoutCallback, VOGNCallback]])
def test_two_callbacks_that_average_are_refused_before_training(callbacks):
    match = r"(VOGN|MCDropout)Callback and (VOGN|MCDropout)Callback each average predictions\. Keep one of them"
    module = RecordingClassifier(net=network(0.3, 0.2))
    before = weights(module)
    with pytest.raises(UnsupportedTrainingError, match=match):
        fit(module, *(callback() for callback in callbacks))
    assert_same_bits(weights(module), before)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"eval_samples": -1}, "eval_samples=-1 must be a whole number of at least 0"),
        ({"eval_samples": 1.5}, "eval_samples=1.5 must be a whole number"),
        ({"p": 1.0, "layers": "net"}, "p=1.0 must be above 0, or all passes would be the same, and below 1"),
        ({"p": -0.1, "layers": "net"}, "p=-0.1 must be above 0, or all passes would be the same, and below 1"),
        ({"p": 0.1}, r"p=0.1 and layers=None belong together: pass a probability, and a regular expression"),
        ({"p": 0.1, "layers": "["}, r"layers='\[' is not a regular expression: unterminated character set"),
        ({"layers": "net"}, r"p=None and layers='net' belong together"),
        ({"link": "probit"}, "link='probit' is unknown"),
    ],
)
def test_arguments_out_of_range_are_refused_at_construction(arguments, match):
    with pytest.raises(HyperparameterError, match=match):
        MCDropoutCallback(**arguments)
