"""`bayes_ddp` on every GPU of this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from lightning_bayes import load_posterior


def fitted(folder, accelerator, devices):
    """What a fit by the command line printed; its checkpoints are below `folder`."""
    options = {"strategy": "bayes_ddp", "accelerator": accelerator, "devices": devices, "max_steps": 4}
    options |= {"max_epochs": -1, "default_root_dir": str(folder), "limit_val_batches": 0}
    trainer = [f"--trainer.{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "lightning_bayes", "fit", "--config", "digits+lenet5+vogn", *trainer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no nccl")
def test_gpus_train_through_nccl(tmp_path):
    said = fitted(tmp_path, "gpu", torch.cuda.device_count())
    assert "distributed_backend=nccl" in said
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert all(precision.isfinite().all() for precision in load_posterior(checkpoint).precision.values())
