"""LoRA by peft on a transformer that is built from a configuration: the adapters have a posterior, the backbone has none."""

from __future__ import annotations

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from oracles import one_example_at_a_time, relative_error
from tiny_training import Classifier, adamw, fit
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import IVONCallback, VOGNCallback
from lightning_bayes.curvature import measure

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def adapted(modules_to_save=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        config = transformers.LlamaConfig(vocab_size=29, num_key_value_heads=1, num_labels=3, pad_token_id=0, **sizes)
        lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], modules_to_save=modules_to_save)
        model = peft.get_peft_model(transformers.LlamaForSequenceClassification(config), lora)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.3)  # zeros at first, where lora_A has no gradient
        return model


def texts(count=12, length=6):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(1, 29, (count, length), generator=generator)
    return TensorDataset(x, x.sum(1) % 3)


class Adapted(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]).logits, batch[1])


@pytest.mark.parametrize("examples", [4, 6])  # as many examples as positions, too
@pytest.mark.parametrize("modules_to_save", [None, ["score"]])
def test_squares_of_the_adapters_equal_the_loop(modules_to_save, examples):
    model = adapted(modules_to_save).double().eval()
    x, y = texts(examples).tensors
    one = lambda m, i: F.cross_entropy(m(x[i : i + 1]).logits, y[i : i + 1])  # noqa: E731
    measured = measure(model, lambda: F.cross_entropy(model(x).logits, y))
    grad, square = one_example_at_a_time(model, list(range(examples)), one)
    assert {name for name in square if "lora_" not in name} == {name for name in square if "score" in name}
    assert relative_error(measured.grad, grad) < 1e-6
    assert relative_error(measured.curvature, square) < 1e-6


@pytest.mark.parametrize("kind", [VOGNCallback, IVONCallback])
def test_the_adapters_alone_have_a_posterior(kind):
    module = Adapted(adamw, adapted(["score"]))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    callback = kind(bayesian=r"lora_")
    fit(module, callback, data=DataLoader(texts(), batch_size=4), max_epochs=2)
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    adapters = {name for name in before if "lora_" in name}
    posterior = callback.optimizer.posterior()
    assert set(posterior.mean) == adapters
    assert moved == adapters | {name for name in before if "score.modules_to_save" in name}
    assert callback.optimizer.num_updates == 6
