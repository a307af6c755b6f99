"""peft's adapters that start at zero or lie beside layers: trained as by plain Adam, with the curvature of a loop."""

from __future__ import annotations

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from oracles import mean_squares

from lightning_bayes import VOGN

VALUES = ["q_proj", "v_proj"]
ADAPTERS = {
    "LoHa": lambda: peft.LoHaConfig(r=2, alpha=4, target_modules=VALUES),
    "LoKr": lambda: peft.LoKrConfig(r=2, alpha=4, target_modules=VALUES),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "VB-LoRA": lambda: peft.VBLoRAConfig(r=2, num_vectors=6, vector_length=8, topk=2, target_modules=VALUES),
    "LoRA of an embedding": lambda: peft.LoraConfig(r=2, lora_alpha=4, target_modules=["embed_tokens"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, target_modules=VALUES, total_step=9, tinit=1, tfinal=2),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=10, target_modules=VALUES),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*one backward pass for each of the"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


def adapted(name, task):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
        config = transformers.LlamaConfig(vocab_size=29, num_key_value_heads=1, num_labels=3, pad_token_id=0, **sizes)
        adapter = ADAPTERS[name]()
        adapter.task_type = task  # "SEQ_CLS" trains the head too; without it, no layer that is measured is called
        model = peft.get_peft_model(transformers.LlamaForSequenceClassification(config), adapter)
        return model.double(), torch.randint(3, 29, (3, 4, 6)), torch.arange(4) % 3


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_trains_as_without_noise_and_its_curvature_is_the_loops(name, task):
    model, batches, y = adapted(name, task)
    plain, *_ = adapted(name, task)
    base, other = (torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, plain))
    optimizer = VOGN(model, base=base, num_data=100, relative_noise=1e-30, curvature_interval=1)
    squares = []
    for x in batches:
        squares.append(
            mean_squares(model, [F.cross_entropy(model(x[i : i + 1]).logits, y[i : i + 1]) for i in range(4)])
        )
        for network, each in ((model, optimizer), (plain, other)):
            each.zero_grad()
            with optimizer.sampled_params() if network is model else torch.enable_grad():
                F.cross_entropy(network(x).logits, y).backward()
            each.step()
    for (key, param), same in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, same, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")
        if key in squares[0]:
            expected = torch.stack([truth[key] for truth in squares]).mean(0)
            torch.testing.assert_close(optimizer.state[param]["curvature"], expected, rtol=1e-5, atol=1e-12)
