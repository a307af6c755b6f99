# %% [markdown]
# # 8. Several processes
#
# `strategy="bayes_ddp"` trains on several devices. Here two processes of this machine play them. With one noise group, two processes
# with batches of 16 make the updates of one process with batches of 32.

# %%
import subprocess
import sys

import torch

from lightning_bayes import load_posterior


def fit(folder, *arguments):
    command = [
        *(sys.executable, "-m", "lightning_bayes", "fit", "--config", "digits+mlp+vogn"),
        *("--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--trainer.enable_progress_bar=false"),
        *(f"--trainer.default_root_dir={folder}", "--trainer.logger=false", *arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return load_posterior(f"{folder}/checkpoints/last.ckpt")


one = fit("one", "--data.batch_size=32")
two = fit(
    "two",
    "--data.batch_size=16",
    "--trainer.devices=2",
    "--trainer.strategy=lightning_bayes.BayesDDPStrategy",
    "--trainer.strategy.init_args.num_groups=1",
)

# %% [markdown]
# A distributed sampler shuffles in another order, so the two runs see other batches; they agree in what does not depend on the order.

# %%
print(f"N: {one.num_data:.0f} and {two.num_data:.0f}")
for name in one.mean:
    sizes = [posterior.mean[name].square().mean().sqrt() for posterior in (one, two)]
    noise = [(1 / posterior.precision[name]).mean().sqrt() for posterior in (one, two)]
    print(f"{name:24} weights {sizes[0]:.4f} {sizes[1]:.4f}   noise {noise[0]:.4f} {noise[1]:.4f}")

# %% [markdown]
# The checkpoint of the second run was written by rank 0, and a single process reads it. It also resumes it:

# %%
resumed = fit("three", "--data.batch_size=32", "--trainer.max_epochs=3", "--ckpt_path=two/checkpoints/last.ckpt")
print("finite:", all(torch.isfinite(mean).all() for mean in resumed.mean.values()))

# %% [markdown]
# [Several devices and faults](../distributed.md) has torchrun and SLURM, samples instead of examples spread over ranks, and what
# happens when a rank dies.
