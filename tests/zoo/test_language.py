"""Text, language models and generation: chunks against slices, metrics against loops, and causality."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_bayes import VadamCallback, VOGNCallback, measure
from lightning_bayes.errors import DataError, DatasetError, HyperparameterError, ShapeError
from lightning_bayes.posteriors import MeanField
from lightning_bayes.zoo import BayesLanguageModel, CharRNN, CharTransformer, TextDataModule, generate
from lightning_bayes.zoo.data import Alphabet
from lightning_bayes.zoo.data.text import Chunks

TEXT = "all happy families are alike; each unhappy family is unhappy in its own way. " * 12
VOCABULARY = len(set(TEXT))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    return TextDataModule(str(tmp_path / "text.txt"), length=8, context=2, batch_size=16)


def networks(context=2):
    small = CharRNN(VOCABULARY, embedding=6, hidden=8, layers=1, context=context)
    return [small, CharTransformer(VOCABULARY, length=10, width=8, heads=2, layers=1, context=context)]


def mean_field(model, std=0.1):
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    return MeanField(mean, {n: torch.full_like(p, std**-2) for n, p in mean.items()}, dict.fromkeys(mean, 1.0), 1)


def test_chunks_predict_every_character_after_the_context_once():
    text, found = torch.arange(40), []
    chunks = Chunks(text, length=6, context=3)
    for inputs, targets in map(chunks.__getitem__, range(len(chunks))):
        assert torch.equal(inputs[-6:] + 1, targets)
        found += targets.tolist()
    assert found == list(range(4, 40))


def test_parts_are_contiguous_and_a_chunk_counts_as_many_examples(data):
    data.setup("fit")
    train, val, test = (part.text for part in (data.train_set, data.val_set, data.test_set))
    assert data.alphabet.decode(torch.cat([train, val, test])) == TEXT
    assert len(train) == round(0.8 * len(TEXT))
    assert data.data_augmentation_factor == 8
    data.setup("test")


def test_the_number_of_data_is_the_number_of_characters(data, quiet_trainer):
    callback, task = VadamCallback(eval_samples=0), BayesLanguageModel(networks()[0], VOCABULARY)
    quiet_trainer(max_epochs=1, limit_val_batches=1, callbacks=[callback]).fit(task, data)
    group = callback.optimizer.param_groups[0]
    assert group["posterior"]["num_data"] * group["posterior"]["data_augmentation_factor"] == 8 * len(data.train_set)


@pytest.mark.parametrize("which", [0, 1])
def test_a_model_is_causal(which, generator):
    model = networks()[which].eval()
    x = torch.randint(VOCABULARY, (3, 10), generator=generator)
    logits = model(x)
    assert logits.shape == (3, VOCABULARY, 8)
    changed = x.clone()
    changed[:, 6] = (x[:, 6] + 1) % VOCABULARY  # position 4 of the chunk
    torch.testing.assert_close(model(changed)[..., :4], logits[..., :4])
    assert (model(changed)[..., 4:] != logits[..., 4:]).any()
    before = x.clone()
    before[:, 0] = (x[:, 0] + 1) % VOCABULARY
    assert (model(before) != logits).any()  # the model uses the context


@pytest.mark.parametrize("which", [0, 1])
def test_squared_gradients_of_chunks_equal_a_loop(which, generator):
    model = networks()[which].double().eval()
    x = torch.randint(VOCABULARY, (4, 10), generator=generator)
    y = torch.randint(VOCABULARY, (4, 8), generator=generator)
    found = measure(model, lambda: F.cross_entropy(model(x), y), "squared_gradients").curvature
    expected = dict.fromkeys(found, 0.0)
    for row in range(4):
        loss = F.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for (name, param), grad in zip(model.named_parameters(), grads, strict=True):
            expected[name] = expected[name] + (torch.zeros_like(param) if grad is None else grad.square()) / 4
    torch.testing.assert_close({name: expected[name] for name in found}, dict(found))


def test_a_fit_beats_the_uniform_distribution_and_logs_its_units(data, quiet_trainer):
    """40 updates with Vadam; nats, bits, perplexity and ECE agree with each other and with the loader's own sums."""
    task = BayesLanguageModel(
        CharRNN(VOCABULARY, embedding=8, hidden=16, layers=1, context=2),
        VOCABULARY,
        lambda p: torch.optim.Adam(p, 0.02),
    )
    trainer = quiet_trainer(max_steps=40, max_epochs=-1, callbacks=[VadamCallback(eval_samples=2)])
    trainer.fit(task, data)
    (result,) = trainer.test(task, data, verbose=False)
    nats = result["test/cls/NLL"]
    assert nats < math.log(VOCABULARY)
    assert result["test/lm/bits"] == pytest.approx(nats / math.log(2), rel=1e-5)
    assert result["test/lm/perplexity"] == pytest.approx(math.exp(nats), rel=1e-5)
    assert 0 <= result["test/cal/ECE"] <= 1
    task.eval()
    losses = [F.cross_entropy(task(x), y, reduction="none").flatten() for x, y in data.test_dataloader()]
    assert result["test_mean/cls/NLL"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_vogn_trains_the_transformer(data, quiet_trainer):
    task = BayesLanguageModel(networks()[1], VOCABULARY)
    trainer = quiet_trainer(
        max_epochs=1, limit_train_batches=2, limit_val_batches=1, callbacks=[VOGNCallback(eval_samples=2)]
    )
    trainer.fit(task, data)
    assert trainer.callback_metrics["val/cls/NLL"].isfinite()


@pytest.mark.parametrize("which", [0, 1])
def test_generated_text_carries_the_uncertainty_of_each_character(which):
    alphabet, model = Alphabet.of(TEXT), networks()[which]
    found = generate(model, mean_field(model), alphabet, "all", length=15, samples=4, window=10)
    assert len(found.text) == len(found.entropy) == len(found.prob) == 15
    assert (found.entropy >= found.mutual_information).all()
    assert found.mutual_information.max() > 0
    again = generate(model, mean_field(model), alphabet, "all", length=15, samples=4, window=10)
    assert (again.text, again.prob.tolist()) == (found.text, found.prob.tolist())
    sure = generate(model, mean_field(model, std=1e-6), alphabet, "all", length=5, samples=4, window=10)
    assert sure.mutual_information.max() < 1e-5
    prob = model.eval()(alphabet.encode("all")[None])[0, :, -1].softmax(0)[alphabet.encode(sure.text[0])[0]]
    torch.testing.assert_close(sure.prob[0], prob.detach(), atol=1e-5, rtol=1e-4)


def test_unknown_characters_are_listed():
    with pytest.raises(DataError, match=r"outside the alphabet: 'β', '✓'\. Remove or replace them"):
        Alphabet.of(TEXT).encode("aβ✓a")
    model = networks()[0]
    with pytest.raises(DataError, match="outside the alphabet: 'Z'"):
        generate(model, mean_field(model), Alphabet.of(TEXT), "a Z")


def test_missing_short_or_undecodable_text_is_rejected(tmp_path):
    with pytest.raises(DatasetError, match=r"no text file .*nothing\.txt\. Set data\.path"):
        TextDataModule(str(tmp_path / "nothing.txt")).setup("fit")
    (tmp_path / "short.txt").write_text("too short", "utf-8")
    with pytest.raises(DataError, match=r"has 9 characters, .* Use a text of more than 510 characters"):
        TextDataModule(str(tmp_path / "short.txt")).setup("fit")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9" * 300)
    with pytest.raises(DataError, match="not UTF-8 text"):
        TextDataModule(str(tmp_path / "latin.txt")).setup("fit")
    with pytest.raises(HyperparameterError, match="length=0"):
        TextDataModule("text.txt", length=0)


def test_inconsistent_sizes_are_rejected():
    task = BayesLanguageModel(networks()[0], VOCABULARY)
    with pytest.raises(HyperparameterError, match=r"Found token 99, .* len\(data\.alphabet\)"):
        task.training_step((torch.full((2, 10), 99), torch.zeros(2, 8, dtype=torch.long)), 0)
    with pytest.raises(ShapeError, match="Expected integer tokens"):
        task.training_step((torch.zeros(2, 10), torch.zeros(2, 8)), 0)
    with pytest.raises(HyperparameterError, match="vocabulary=1"):
        BayesLanguageModel(networks()[0], 1)
    with pytest.raises(HyperparameterError, match="cells are lstm, gru"):
        CharRNN(5, cell="rnn")
    with pytest.raises(HyperparameterError, match="heads must divide the width"):
        CharTransformer(5, width=7)
    with pytest.raises(HyperparameterError, match="A chunk of 11 characters"):
        networks()[1](torch.zeros(1, 11, dtype=torch.long))
    model = networks()[0]
    with pytest.raises(HyperparameterError, match="a prompt of 2 characters"):
        generate(model, mean_field(model), Alphabet.of(TEXT), "al")
