"""Damaged and foreign checkpoints are refused by name, and the module does not change."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback
from tiny_training import Classifier, assert_same_bits, loader, mlp, quiet_trainer, weights

from lightning_bayes import VOGNCallback, load_posterior
from lightning_bayes.callbacks.fit.checkpoint_io import AtomicCheckpointIO
from lightning_bayes.errors import CheckpointError, PosteriorError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of a checkpoint after six updates."""
    trainer = quiet_trainer(VOGNCallback(lr=0.01, num_data=48))
    trainer.fit(Classifier(), loader())
    path = tmp_path_factory.mktemp("saved") / "last.ckpt"
    trainer.save_checkpoint(path)
    return path.read_bytes()


def read(data):
    return torch.load(io.BytesIO(data), weights_only=True)


def flip(data, position, bit=0):
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def flipped_in_a_weight(data):
    weight = read(data)["state_dict"]["net.0.weight"]
    return flip(data, data.index(weight.numpy().tobytes()) + 3, 6)


BROKEN = {
    "truncated": (lambda data: data[: len(data) // 2], r"cannot be read as a checkpoint \(.*Is the file complete\?"),
    "empty": (lambda data: b"", r"cannot be read as a checkpoint"),
    "a flipped bit": (
        flipped_in_a_weight,
        r"is damaged: the checksum of archive/data/\d+ is wrong.*earlier checkpoint",
    ),
    "a text": (lambda data: b"no checkpoint at all", r"cannot be read as a checkpoint"),
    "another pickle": (
        lambda data: pickle.dumps([1.0, 2.0]),
        r"cannot be read as a checkpoint|no Lightning checkpoint",
    ),
}
broken = pytest.mark.parametrize("kind", BROKEN)


def damaged(saved, kind, tmp_path):
    make, message = BROKEN[kind]
    path = tmp_path / "last.ckpt"
    path.write_bytes(make(saved))
    return path, rf"last\.ckpt (?:{message})"


def test_torch_reads_a_flipped_bit_without_a_word(saved):
    """The reason to verify checksums."""
    wrong = read(flipped_in_a_weight(saved))["state_dict"]["net.0.weight"]
    assert not torch.equal(wrong, read(saved)["state_dict"]["net.0.weight"])


@broken
def test_a_damaged_file_holds_no_posterior(saved, kind, tmp_path):
    path, message = damaged(saved, kind, tmp_path)
    with pytest.raises(PosteriorError, match=message):
        load_posterior(path)


def refused(error, message, path, module):
    """The module keeps its own weights, and trains afterwards."""
    before, callback = weights(module), VOGNCallback(lr=0.01)
    with pytest.raises(error, match=message):
        quiet_trainer(callback, max_epochs=3).fit(module, loader(), ckpt_path=path)
    assert_same_bits(weights(module), before)
    quiet_trainer(callback).fit(module, loader())
    assert callback.optimizer.num_updates == 6
    assert not torch.equal(module.net[0].weight, before["net.0.weight"])


@broken
def test_a_damaged_file_is_not_resumed(saved, kind, tmp_path):
    path, message = damaged(saved, kind, tmp_path)
    refused(PosteriorError, message, path, Classifier(net=mlp(seed=5)))


def test_a_damaged_file_is_not_tested(saved, tmp_path):
    path, message = damaged(saved, "a flipped bit", tmp_path)

    class Tested(Classifier):
        def test_step(self, batch, batch_idx):
            self(batch[0])

    module = Tested(net=mlp(seed=5))
    before = weights(module)
    with pytest.raises(PosteriorError, match=message):
        quiet_trainer(VOGNCallback()).test(module, loader(), ckpt_path=path)
    assert_same_bits(weights(module), before)


def same_contents(found, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_contents(found[k], expected[k]) for k in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same_contents, found, expected))
    return found == expected


def test_no_flipped_bit_is_read_as_something_else(saved, tmp_path):
    """Anywhere in the file: the same contents, or an error that names the file."""
    path, draw, same, refusals = tmp_path / "last.ckpt", random.Random(0), [], []
    flips = [(draw.randrange(len(saved)), draw.randrange(8)) for _ in range(200)]
    entry = saved.rindex(b"PK\x01\x02", 0, saved.rindex(b"archive/data/1"))  # of one tensor in the archive's directory
    flips += [(position, bit) for position in range(entry, entry + 60) for bit in range(8)]
    for position, bit in flips:
        path.write_bytes(flip(saved, position, bit))
        try:
            found = AtomicCheckpointIO().load_checkpoint(path)
        except PosteriorError as error:
            refusals.append(str(error))
        else:
            same.append(same_contents(found, read(saved)))
    assert refusals
    assert same
    assert all(same)
    assert all("last.ckpt" in message for message in refusals)


def test_a_plugin_of_the_users_stays():
    class Own(TorchCheckpointIO):
        pass

    class Seen(Callback):
        def on_train_end(self, trainer, pl_module):
            self.plugin = trainer.strategy.checkpoint_io

    own, seen = Own(), Seen()
    quiet_trainer(VOGNCallback(), seen).fit(Classifier(), loader())
    assert type(seen.plugin) is AtomicCheckpointIO
    quiet_trainer(VOGNCallback(), seen, plugins=[own]).fit(Classifier(), loader())
    assert seen.plugin is own


def test_what_cannot_be_written_is_named_and_the_old_file_stays(saved, tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    path.write_bytes(saved)

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    message = r"last\.ckpt could not be written \(No space left on device\).*still intact.*ckpt_path="
    with pytest.raises(CheckpointError, match=message):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert path.read_bytes() == saved
