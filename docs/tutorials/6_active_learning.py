# %% [markdown]
# # 6. Active learning
#
# Starting from a pool of unlabelled digits with 20 labels, each round labels 20 more. The posterior selects them: BALD is the
# mutual information between the label and the weights.

# %%
import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader, Subset

from lightning_bayes import VOGNCallback, mc_predict
from lightning_bayes.predictive import entropy, mutual_information
from lightning_bayes.zoo import MLP, BayesClassifier, DigitsDataModule

digits = DigitsDataModule(eval_ood=False)
digits.setup("fit")
images = digits.train_set.tensors[0]
test, classes = digits.test_set.tensors


def fit(rows):
    seed_everything(0, verbose=False)
    network = MLP(in_features=64, out_features=10, hidden=[100])
    task = BayesClassifier(
        network, num_classes=10, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2)
    )
    # more noise than the default, so that samples disagree
    callback = VOGNCallback(relative_noise=0.2)
    trainer = Trainer(
        max_epochs=30,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    labelled = Subset(digits.train_set, rows.tolist())
    trainer.fit(task, DataLoader(labelled, batch_size=20, shuffle=True))
    return task.eval(), callback.optimizer.posterior()


# %% [markdown]
# Every round trains from scratch on the labelled rows, predicts the remaining pool, and labels the rows with the highest score.
# Random selection is the control. The experiment runs for two seeds of the initial 20 labels.

# %%
scores = {
    "random": lambda probs: torch.rand(probs.shape[1]),
    "entropy": lambda probs: entropy(probs.mean(0)),
    "BALD": mutual_information,
}
rounds, seeds, accuracy = 5, (0, 1), {}
for name, score in scores.items():
    for seed in seeds:
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(seed)
        )
        labelled, pool = order[:20], order[20:]
        curve = []
        for _ in range(rounds):
            task, posterior = fit(labelled)
            predicted = mc_predict(task, posterior, test, samples=32).probs.argmax(1)
            curve.append((predicted == classes).float().mean().item())
            candidates = mc_predict(task, posterior, images[pool], samples=32)
            ranked = pool[score(candidates.sample_probs).argsort(descending=True)]
            labelled, pool = torch.cat([labelled, ranked[:20]]), ranked[20:]
        accuracy[name, seed] = torch.tensor(curve)

labels = torch.arange(20, 20 + 20 * rounds, 20)
print("labels   ", *(f"{count:6d}" for count in labels))
for name in scores:
    mean = torch.stack([accuracy[name, seed] for seed in seeds]).mean(0)
    print(f"{name:9}", *(f"{value:6.3f}" for value in mean))

# %%
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name, color in zip(scores, ("0.5", "#4292c6", "#d95f02"), strict=True):
    for seed in seeds:
        ax.plot(labels, accuracy[name, seed], color=color, alpha=0.4)
    ax.plot(
        labels,
        torch.stack([accuracy[name, seed] for seed in seeds]).mean(0),
        color=color,
        linewidth=2,
        label=name,
    )
ax.set(xlabel="labels", ylabel="accuracy on 400 test digits")
ax.legend(frameon=False)
figure.savefig("curves.png", dpi=110)

# %% [markdown]
# Thin lines are single runs. With two seeds and five rounds, differences of two or three points are within the variation between
# runs, and on such an easy problem random selection is hard to beat: keep it as a control on your own data.
# [baal](https://baal.readthedocs.io) has scores of whole batches, which avoid redundant rows.
