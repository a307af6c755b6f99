# requires: peft
# %% [markdown]
# # 7. LoRA: a posterior for the adapters only
#
# A network trained on the digits 0 to 4 is adapted to 5 to 9 with low-rank adapters from peft. The backbone is frozen, and only
# the adapters have a posterior. The same code works for a transformers language model.

# %%
from copy import deepcopy

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import IVONCallback, VOGNCallback, mc_predict
from lightning_bayes.zoo import DigitsDataModule

digits = DigitsDataModule(eval_ood=False)
digits.setup("fit")


def part(dataset, low):
    images, classes = dataset.tensors
    chosen = (classes >= low) & (classes < low + 5)
    return TensorDataset(images[chosen].flatten(1), classes[chosen] - low)


seed_everything(0, verbose=False)
backbone = torch.nn.Sequential(
    torch.nn.Linear(64, 128),
    torch.nn.ReLU(),
    torch.nn.Linear(128, 128),
    torch.nn.ReLU(),
    torch.nn.Linear(128, 5),
)
adam = torch.optim.Adam(backbone.parameters(), lr=2e-3)
for _ in range(20):
    for inputs, classes in DataLoader(
        part(digits.train_set, 0), batch_size=32, shuffle=True
    ):
        adam.zero_grad()
        F.cross_entropy(backbone(inputs), classes).backward()
        adam.step()
inputs, classes = part(digits.test_set, 0).tensors
print(
    f"digits 0 to 4: accuracy {(backbone(inputs).argmax(1) == classes).float().mean():.3f}"
)

# %% [markdown]
# peft replaces the named layers. Its modules contain ordinary linear layers, which the curvature rules support.


# %%
class Adapted(LightningModule):
    def __init__(self):
        super().__init__()
        adapters = LoraConfig(
            r=4, lora_alpha=8, target_modules=["0", "2"], modules_to_save=["4"]
        )
        self.net = get_peft_model(deepcopy(backbone), adapters)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad], lr=5e-3
        )


few = part(digits.train_set, 5)
few = TensorDataset(*(tensor[:60] for tensor in few.tensors))
test, test_classes = part(digits.test_set, 5).tensors


def fit(*callbacks):
    seed_everything(0, verbose=False)
    module = Adapted()
    trainer = Trainer(
        max_epochs=30,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(few, batch_size=12, shuffle=True))
    return module.eval()


# %%
def show(name, probs):
    nll = F.nll_loss(probs.log(), test_classes)
    print(
        f"{name:6} accuracy {(probs.argmax(1) == test_classes).float().mean():.3f}   NLL {nll:.3f}"
    )


with torch.no_grad():
    show("AdamW", fit()(test).softmax(-1))
for name, callback in {"VOGN": VOGNCallback(), "IVON": IVONCallback()}.items():
    module = fit(callback)
    posterior = callback.optimizer.posterior()
    show(name, mc_predict(module, posterior, test, samples=32).probs)
total = sum(p.numel() for p in module.parameters())
uncertain = sum(mean.numel() for mean in posterior.mean.values())
print(f"\n{uncertain:,} of {total:,} parameters have a posterior:")
print(*sorted(posterior.mean), sep="\n")

# %% [markdown]
# With 60 images and one seed, the table shows that the method works, not which method is best. For a language model, pass its
# peft model in the same way. If a layer has no per-example gradients, use `IVONCallback`, which needs none.
