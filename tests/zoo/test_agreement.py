"""The transform that a fit attaches to a model. The class check is tested with each data module."""

from __future__ import annotations

from fake_images import write_idx_sets
from torch import nn

from lightning_bayes import VOGNCallback, zoo
from lightning_bayes.zoo import BayesClassifier, ImageTransform, create_model, input_transform
from lightning_bayes.zoo.data import ImageFolderDataModule, MNISTDataModule


def pictures(root, mean=0.5):
    return ImageFolderDataModule(str(root), image_size=8, resize=10, mean=(mean,) * 3, std=(0.25,) * 3, batch_size=8)


def test_the_file_stores_the_transform_of_the_fit(picture_root, quiet_trainer, tmp_path):
    model = create_model("mlp", num_classes=2, in_channels=3, image_size=8)
    callback = VOGNCallback()
    trainer = quiet_trainer(callback, max_epochs=1, limit_train_batches=1)
    trainer.fit(BayesClassifier(model, num_classes=2), datamodule=pictures(picture_root))
    zoo.save_posterior(tmp_path / "q.pt", model, callback.optimizer.posterior().select("model."))
    assert zoo.load(tmp_path / "q.pt").transform == ImageTransform(8, (0.5,) * 3, (0.25,) * 3, resize=10)


def test_a_transform_that_differs_from_the_pretrained_one_is_reported(picture_root, quiet_trainer, said):
    model = create_model("mlp", num_classes=2, in_channels=3, image_size=8)
    task, once = BayesClassifier(model, num_classes=2), {"max_epochs": 1, "limit_train_batches": 1}
    for mean in (0.5, 0.5):
        quiet_trainer(**once).fit(task, datamodule=pictures(picture_root, mean))
    assert "were trained with" not in said.text
    quiet_trainer(**once).fit(task, datamodule=pictures(picture_root, mean=0.4))
    assert "weights of MLP were trained with ImageTransform(image_size=8, mean=(0.5, 0.5, 0.5)" in said.text
    assert "fit uses ImageTransform(image_size=8, mean=(0.4, 0.4, 0.4)" in said.text
    assert input_transform(model).mean == (0.4,) * 3


def test_testing_does_not_change_the_transform(quiet_trainer, tmp_path):
    write_idx_sets(tmp_path)
    data = MNISTDataModule(str(tmp_path), val_size=8)
    task = BayesClassifier(create_model("mlp", in_channels=1), num_classes=10)
    quiet_trainer().test(task, datamodule=data, verbose=False)
    assert input_transform(task.model) is None
    quiet_trainer(max_epochs=1).fit(task, datamodule=data)
    assert input_transform(task.model) == data.transform


def test_a_model_not_built_by_create_model_is_not_changed(quiet_trainer, tmp_path):
    write_idx_sets(tmp_path)
    task = BayesClassifier(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), num_classes=10)
    quiet_trainer(max_epochs=1).fit(task, datamodule=MNISTDataModule(str(tmp_path), val_size=8))
    assert all("zoo_transform" not in vars(layer) for layer in task.modules())
