# %% [markdown]
# # 8. Several processes
#
# `strategy="bayes_ddp"` trains on several devices. Here two processes on one machine stand in for two devices. With one noise
# group, two processes with batches of 16 perform the same updates as one process with batches of 32.

# %%
import subprocess
import sys

import torch

from lightning_bayes import load_posterior


def fit(folder, *arguments):
    command = [
        *(
            sys.executable,
            "-m",
            "lightning_bayes",
            "fit",
            "--config",
            "digits+mlp+vogn",
        ),
        *(
            "--trainer.accelerator=cpu",
            "--trainer.max_epochs=2",
            "--trainer.enable_progress_bar=false",
        ),
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
# A distributed sampler shuffles in a different order, so the two runs see different batches. They agree in everything that does
# not depend on the order.

# %%
print(f"N: {one.num_data:.0f} and {two.num_data:.0f}")
for name in one.mean:
    sizes = [posterior.mean[name].square().mean().sqrt() for posterior in (one, two)]
    noise = [(1 / posterior.precision[name]).mean().sqrt() for posterior in (one, two)]
    print(
        f"{name:24} weights {sizes[0]:.4f} {sizes[1]:.4f}   noise {noise[0]:.4f} {noise[1]:.4f}"
    )

# %% [markdown]
# Rank 0 wrote the checkpoint of the second run. A single process can read it, and resume from it:

# %%
resumed = fit(
    "three",
    "--data.batch_size=32",
    "--trainer.max_epochs=3",
    "--ckpt_path=two/checkpoints/last.ckpt",
)
print("finite:", all(torch.isfinite(mean).all() for mean in resumed.mean.values()))

# %% [markdown]
# [Distributed training](../distributed.md) covers torchrun and SLURM, distributing weight samples instead of examples, and the
# behaviour when a rank fails.
