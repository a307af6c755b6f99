# %% [markdown]
# # 2. Calibration and out-of-distribution inputs
#
# An MLP is trained on 300 handwritten digits of scikit-learn, few enough to make it overconfident. The same functions evaluate
# Adam alone, VOGN, and a Laplace approximation around Adam's weights.

# %%
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader, Subset

from lightning_bayes import VOGNCallback, laplace, mc_predict
from lightning_bayes.metrics import (
    classification_metrics,
    ood_auroc,
    reliability_diagram,
    risk_coverage_diagram,
    score_histograms,
)
from lightning_bayes.predictive import entropy, fit_temperature
from lightning_bayes.zoo import MLP, BayesClassifier, DigitsDataModule

digits = DigitsDataModule()
digits.setup("fit")
train = DataLoader(Subset(digits.train_set, range(300)), batch_size=30, shuffle=True)
validation, validation_classes = digits.val_set.tensors
test, classes = digits.test_set.tensors
# photo patches and shuffled digits
outside = torch.cat([ood_set.tensors[0] for ood_set in digits.ood_sets])
print(len(test), "test digits,", len(outside), "out-of-distribution inputs")


# %%
def fit(*callbacks):
    seed_everything(0, verbose=False)
    network = MLP(in_features=64, out_features=10, hidden=[100, 100])
    task = BayesClassifier(
        network, num_classes=10, optimizer=lambda p: torch.optim.Adam(p, lr=2e-3)
    )
    trainer = Trainer(
        max_epochs=60,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, train)
    return task.eval()


adam = fit()
callback = VOGNCallback()
vogn = fit(callback)
# Kronecker factors of the last layer, prior by marginal likelihood
evidence = laplace(adam, train, "classification")
chosen = laplace(
    adam,
    train,
    "classification",
    prior_precision="validation",
    validation=digits.val_dataloader(),
)
for name, result in {"marginal likelihood": evidence, "validation": chosen}.items():
    print(
        f"prior precision by {name}: {next(iter(result.prior_precision.values())):.3g}"
    )

# %% [markdown]
# A temperature is chosen on validation digits, never on the test set. For a sampled posterior it divides the logits of every
# sample.


# %%
@torch.no_grad()
def adam_probs(x, temperature=1.0):
    return (adam(x) / temperature).softmax(-1)


with torch.no_grad():
    temperature = float(fit_temperature(adam(validation)[None], validation_classes))
methods = {
    "Adam": adam_probs,
    "Adam, temperature": lambda x: adam_probs(x, temperature),
    "VOGN": lambda x: (
        mc_predict(vogn, callback.optimizer.posterior(), x, samples=64).probs
    ),
    "Laplace, evidence": lambda x: (
        mc_predict(adam, evidence.posterior, x, linearized="closed_form").probs
    ),
    "Laplace, validation": lambda x: (
        mc_predict(adam, chosen.posterior, x, linearized="closed_form").probs
    ),
}
inside = {name: predict(test) for name, predict in methods.items()}
out = {name: predict(outside) for name, predict in methods.items()}

is_ood = torch.cat([torch.zeros(len(test)), torch.ones(len(outside))]).bool()
print(f"temperature {temperature:.2f}\n")
print(f"{'':20} accuracy     NLL     ECE  OOD AUROC")
for name, probs in inside.items():
    metrics = classification_metrics(num_classes=10, prefix="")
    metrics.update(probs, classes)
    values = {key: float(value) for key, value in metrics.compute().items()}
    auroc = float(ood_auroc(torch.cat([entropy(probs), entropy(out[name])]), is_ood))
    print(
        f"{name:20} {values['cls/Acc']:8.3f} {values['cls/NLL']:7.3f} {values['cal/ECE']:7.3f} {auroc:10.3f}"
    )

# %% [markdown]
# This is one seed and one small problem, so compare the columns, not the ranking. NLL and ECE evaluate the probabilities on
# digits. The AUROC measures how well the entropy separates digits from other inputs. The prior of a Laplace approximation
# matters: with 300 images, the marginal likelihood chooses a prior that is far too wide here.

# %%
shown = ("Adam", "VOGN", "Laplace, validation")
reliability_diagram({name: (inside[name], classes) for name in shown}).savefig(
    "1_reliability.png"
)
entropies = {
    name: {"digits": entropy(inside[name]), "outside": entropy(out[name])}
    for name in shown
}
score_histograms(entropies, title="Predictive entropy").savefig("2_entropy.png")
risk_coverage_diagram({name: (inside[name], classes) for name in shown}).savefig(
    "3_risk_coverage.png"
)

# %% [markdown]
# Bars below the diagonal of the reliability diagram indicate overconfidence. The risk-coverage curve shows the error on the
# answered inputs if the least certain ones are rejected.
#
# On the command line, `lightning-bayes test` writes these figures and metrics for any run; see [evaluation](../evaluation.md).
