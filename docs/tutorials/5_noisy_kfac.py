# %% [markdown]
# # 5. Noisy K-FAC: correlated weights
#
# VOGN has one variance per weight. Noisy K-FAC has one matrix-variate Gaussian per layer, whose precision is a Kronecker product
# L ⊗ R, so the weights of a layer are correlated. This tutorial trains both on digits and looks at the correlations.

# %%
import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_bayes import NoisyKFACCallback, VOGNCallback, load_posterior
from lightning_bayes.zoo import MLP, BayesClassifier, DigitsDataModule

digits = DigitsDataModule(batch_size=32, eval_ood=False)


def fit(callback, path):
    seed_everything(0, verbose=False)
    network = MLP(in_features=64, out_features=10, hidden=[50])
    task = BayesClassifier(
        network, num_classes=10, optimizer=lambda p: torch.optim.Adam(p, lr=2e-3)
    )
    trainer = Trainer(
        max_epochs=15,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, digits)
    trainer.save_checkpoint(path)
    return trainer.test(task, digits, verbose=False)[0]


keys = ("test/cls/Acc", "test/cls/NLL", "test/cal/ECE")
for name, callback in {
    "VOGN": VOGNCallback(),
    "Noisy K-FAC": NoisyKFACCallback(),
}.items():
    metrics = fit(callback, f"{name}.ckpt")
    print(f"{name:12}", "  ".join(f"{key} {metrics[key]:.4f}" for key in keys))

# %% [markdown]
# The posterior of Noisy K-FAC is a `MatrixGaussian`. For the weight of a layer, `factors` are L (over outputs) and R (over
# inputs, with the bias last).

# %%
posterior = load_posterior("Noisy K-FAC.ckpt")
name, (left, right) = next(iter(posterior.factors.items()))
print(type(posterior).__name__, name, tuple(left.shape), tuple(right.shape))


def correlations(precision):
    covariance = torch.linalg.inv(precision.double())
    deviations = covariance.diagonal().sqrt()
    return covariance / deviations.outer(deviations)


# between the input weights of one unit, by pixel
inputs = correlations(right)[:64, :64]
off_diagonal = inputs - inputs.diag().diag()
print(
    f"largest correlation between two pixels' weights: {off_diagonal.abs().max():.3f}"
)

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
axes[0].imshow(inputs, cmap="RdBu", vmin=-1, vmax=1)
axes[0].set_title("correlation by pair of pixels")
axes[1].imshow(inputs[27].reshape(8, 8), cmap="RdBu", vmin=-1, vmax=1)
axes[1].set_title("with the pixel in row 3, column 3")
picture = axes[2].imshow(correlations(left), cmap="RdBu", vmin=-1, vmax=1)
axes[2].set_title("correlation by pair of hidden units")
figure.colorbar(picture, ax=axes)
figure.savefig("correlations.png", dpi=110)

# %% [markdown]
# The pixels of digits are correlated, so the data determine sums of neighbouring weights better than each weight alone. A
# diagonal posterior cannot represent this.
#
# By default the factors are measured every twentieth update and inverted every two hundredth (`stats_interval`,
# `inverse_interval`). [Methods](../methods.md) describes the factors of the BackPACK engine, and
# [the paper](../zhang2018.md) compares the method with Hamiltonian Monte Carlo.
