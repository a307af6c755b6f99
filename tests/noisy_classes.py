"""Classes that no network can tell for sure, so that a prediction's confidence and width have a best scale."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from tiny_training import CLASSES, FEATURES
from torch.utils.data import DataLoader, TensorDataset


def noisy(examples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, FEATURES, generator=generator)
    logits = 2 * inputs[:, :CLASSES]
    return TensorDataset(inputs, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1))


TRAIN, VALIDATION, TEST = noisy(48, 0), noisy(60, 1), noisy(40, 2)


def batches(dataset):
    return DataLoader(dataset, batch_size=16)


class Data(LightningDataModule):
    def train_dataloader(self):
        return batches(TRAIN)

    def val_dataloader(self):
        return batches(VALIDATION)

    def test_dataloader(self):
        return batches(TEST)

    predict_dataloader = test_dataloader
