# %% [markdown]
# # 1. Train your own module with uncertainty
#
# This tutorial trains a small classifier on the two-moons data, once with AdamW alone and once with `VOGNCallback`. The module
# itself contains nothing Bayesian.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import make_moons
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import VOGNCallback, load_posterior, mc_predict


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 50),
            torch.nn.Tanh(),
            torch.nn.Linear(50, 50),
            torch.nn.Tanh(),
            torch.nn.Linear(50, 2),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        inputs, classes = batch
        return F.cross_entropy(self(inputs), classes)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


# %% [markdown]
# The same function trains both models. The only difference is the callback.


# %%
inputs, classes = make_moons(200, noise=0.2, random_state=0)
data = TensorDataset(torch.tensor(inputs, dtype=torch.float32), torch.tensor(classes))
loader = DataLoader(data, batch_size=20, shuffle=True)


def train(*callbacks):
    seed_everything(0, verbose=False)
    trainer = Trainer(
        max_epochs=60,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    trainer.fit(module, loader)
    return module, trainer


adam, _ = train()
vogn, trainer = train(VOGNCallback())
trainer.save_checkpoint("vogn.ckpt")

# %% [markdown]
# The checkpoint is an ordinary Lightning checkpoint. Its weights are the posterior mean, and `load_posterior` reads the
# posterior.

# %%
posterior = load_posterior("vogn.ckpt")
print(posterior)
deviations = {
    name: (1 / precision).sqrt().mean().item()
    for name, precision in posterior.precision.items()
}
for name, deviation in deviations.items():
    print(
        f"{name:12} mean |weight| {posterior.mean[name].abs().mean():.3f}   mean standard deviation {deviation:.3f}"
    )

# %% [markdown]
# `mc_predict` averages probabilities over posterior samples. The mutual information is the part of the predictive uncertainty
# that comes from the weights. AdamW has a single set of weights, so it has no mutual information.

# %%
steps = torch.linspace(-3, 4, 120)
grid = torch.cartesian_prod(steps, steps)
prediction = mc_predict(vogn, posterior, grid, samples=64)
with torch.no_grad():
    adam_probs = adam.eval()(grid).softmax(-1)

panels = {
    "AdamW: probability": adam_probs[:, 1],
    "VOGN: probability": prediction.probs[:, 1],
    "VOGN: mutual information": prediction.mutual_information,
}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", sharey=True)
for ax, (title, values) in zip(axes, panels.items(), strict=True):
    is_probability = "probability" in title
    picture = ax.contourf(
        steps,
        steps,
        values.reshape(120, 120).T,
        levels=torch.linspace(0, 1, 11).tolist() if is_probability else 10,
        cmap="RdBu" if is_probability else "viridis",
    )
    ax.scatter(
        *inputs.T, c=classes, cmap="RdBu", edgecolor="black", linewidth=0.4, s=14
    )
    ax.set_title(title)
    figure.colorbar(picture, ax=ax)
figure.savefig("moons.png", dpi=110)

# %% [markdown]
# The mutual information is largest along the decision boundary, and along it grows with the distance from the data. Far from the
# boundary, the default posterior is as confident as AdamW: its noise is small, so that short runs lose nothing. For a wider
# posterior, pass `VOGNCallback(relative_noise=...)`. [The tutorial on intervals](4_regression_intervals.md) shows posteriors
# whose width follows from the prior.
