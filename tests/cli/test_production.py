"""After a fit, a run is served, tested and continued without the pretrained weights that it began with."""

from __future__ import annotations

import csv
import shutil
import sys

import pytest
import torch
from fake_images import write_image_folder
from jsonargparse import Namespace

from lightning_bayes import Predictor
from lightning_bayes.cli.commands import main
from lightning_bayes.cli.runs import drop_pretrained
from lightning_bayes.zoo import create_model

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
CLASSES = ("cat", "dog")


def command(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-bayes", *arguments])
        main()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the run of two epochs of an MLP from pretrained weights, which have gone, as have the pictures."""
    folder = tmp_path_factory.mktemp("home")
    write_image_folder(folder / "pictures", CLASSES, count=12)
    torch.save(create_model("mlp", num_classes=5, in_channels=3, image_size=8).state_dict(), folder / "weights.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PL_GLOBAL_SEED", "0")
        options = [
            "--data.root=pictures",
            "--data.image_size=8",
            "--data.resize=8",
            "--data.num_workers=0",
            "--trainer.log_every_n_steps=1",
        ]
        network = ["--model.model=lightning_bayes.zoo.create_model", "--model.model.name=mlp"]
        network += ["--model.model.pretrained=weights.pt", "--model.model.dict_kwargs.image_size=8"]
        command("fit", "--config=image_folder+mlp+vogn", *QUIET, *options, *network, "--trainer.max_epochs=2")
    (folder / "weights.pt").unlink()
    shutil.move(folder / "pictures", folder / "elsewhere")
    return folder


@pytest.fixture(autouse=True)
def _there(home, monkeypatch, _seed_variables):
    monkeypatch.chdir(home)


def run_of(home):
    return next(home.glob("runs/*/version_0"))


def evaluated(subcommand, home, *options):
    run = run_of(home)
    command(
        subcommand, f"--config={run / 'config.yaml'}", *QUIET, f"--ckpt_path={run / 'checkpoints/last.ckpt'}", *options
    )


def test_a_run_is_exported_and_served_without_pretrained_weights_and_data(home):
    command("export", str(run_of(home)), "net.safetensors")
    image = "elsewhere/cat/1.png"
    of_run, of_file = Predictor.load(run_of(home)), Predictor.load("net.safetensors")
    assert torch.equal(of_run(image).probs, of_file(image).probs)
    assert of_run.saved.class_names == CLASSES
    assert of_run.saved.config["model"]["init_args"]["model"]["init_args"]["pretrained"] == "weights.pt"


def test_a_run_is_tested_and_continued_without_pretrained_weights(home, tmp_path):
    evaluated("test", home, "--data.root=elsewhere", "--trainer.logger=false")
    options = ["--data.root=elsewhere", "--trainer.max_epochs=3", f"--trainer.logger.save_dir={tmp_path}"]
    evaluated("fit", home, *options)
    shutil.copy(run_of(home) / "checkpoints" / "last.ckpt", tmp_path)
    other = create_model("mlp", num_classes=5, in_channels=3, image_size=8).state_dict()
    torch.save(other, "weights.pt")  # other weights, as a sign that they are not read
    try:
        evaluated("fit", home, *options)
    finally:
        (home / "weights.pt").unlink()
    first, second = sorted(tmp_path.glob("*/version_*/checkpoints/last.ckpt"))
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (first, second)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_predict_writes_a_row_for_a_file_that_is_no_image_and_counts_them(home, tmp_path, caplog):
    shutil.copytree(home / "elsewhere" / "cat", tmp_path / "new")
    whole = (tmp_path / "new" / "1.png").read_bytes()
    (tmp_path / "new" / "1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "new" / "2.png").write_text("no image")
    options = [f"--data.predict_dir={tmp_path / 'new'}", f"--output={tmp_path / 'p.csv'}", "--reject_below=0.1"]
    evaluated("predict", home, *options, "--data.batch_size=2", "--trainer.logger=false")
    with (tmp_path / "p.csv").open() as file:
        rows = {row["file"].rpartition("/")[2]: row for row in csv.DictReader(file)}
    assert len(rows) == 12
    predict = Predictor.load(run_of(home), samples=32)
    for name, row in rows.items():
        is_broken = name in {"1.png", "2.png"}
        assert bool(row["error"]) == is_broken, name
        assert row["reject"] == str(is_broken), name
        assert row["label"] == ("" if is_broken else predict(tmp_path / "new" / name).labels[0]), name
        assert (row["probs_cat"] == "nan") == is_broken, name
    assert rows["2.png"]["error"].startswith("UnidentifiedImageError: ")
    assert "10 predictions (" in caplog.text
    assert "2 files could not be read: their rows say why in the column error." in caplog.text


@pytest.mark.parametrize("kind", [dict, Namespace], ids=["of a file", "of the command line"])
def test_pretrained_weights_of_every_network_in_a_config_are_dropped(kind):
    def node(path, **arguments):
        return kind(class_path=path, init_args=kind(**arguments))

    inner = node("torchvision.models.resnet18", weights="IMAGENET1K_V1", num_classes=2)
    timm = node("timm.create_model", model_name="resnet18", pretrained=True)
    ours = node("lightning_bayes.zoo.create_model", name="timm/resnet18", pretrained="w.pt")
    task = node("my.Task", parts=node("my.Pair", first=inner, second=timm), model=ours, pretrained="the user's own")
    drop_pretrained(task)
    assert inner["init_args"]["weights"] is None
    assert timm["init_args"]["pretrained"] is False
    assert ours["init_args"]["pretrained"] is None
    assert task["init_args"]["pretrained"] == "the user's own"
