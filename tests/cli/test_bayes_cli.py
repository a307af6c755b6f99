"""The command line, in this process through `main` and once as a process of its own."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from fake_images import write_image_folder
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lightning_bayes import Predictor, load_posterior, mc_predict
from lightning_bayes.cli import bayes_cli
from lightning_bayes.cli.bayes_cli import instantiate
from lightning_bayes.cli.commands import main
from lightning_bayes.cli.composition import known, recipes
from lightning_bayes.errors import DataError, DatasetError
from lightning_bayes.zoo import BayesClassifier, DigitsDataModule, LeNet5, list_models
from lightning_bayes.zoo.registry import DATA

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
DOCUMENTED = [
    *("lr", "mc_samples", "eval_samples", "prior_precision", "kl_weight", "kl_warmup_steps", "betas", "damping"),
    *("data_augmentation_factor", "init_precision", "num_data", "engine", "seed"),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch, _seed_variables):
    """Another working directory, and Lightning's variables are put back."""
    monkeypatch.chdir(tmp_path)


def command(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-bayes", *arguments])
        main()


def refused(capsys, *arguments):
    """The status and the last lines of a command that stops."""
    with pytest.raises(SystemExit) as stopped:
        command(*arguments)
    return stopped.value.code, capsys.readouterr()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """The run folder of three epochs of VOGN on the digits."""
    folder = tmp_path_factory.mktemp("fitted")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PL_GLOBAL_SEED", "0")
        command("fit", "--config", "digits+lenet5+vogn", *QUIET, "--trainer.max_epochs=3")
    return folder / "runs" / "digits_lenet5_vogn" / "version_0"


def network_of(fitted):
    """The network of a fit at the mean of its posterior, in evaluation mode."""
    module = BayesClassifier(LeNet5(image_size=8), num_classes=10)
    module.load_state_dict(torch.load(fitted / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    return module.eval()


def posterior_of(fitted):
    return load_posterior(fitted / "checkpoints" / "last.ckpt")


def digits():
    """The test images and their labels."""
    data = DigitsDataModule()
    data.setup("test")
    return data.test_set.tensors


@pytest.fixture(scope="module")
def tested(fitted, tmp_path_factory):
    """The run folder of a test of the fitted model, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("tested"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.setenv("PL_GLOBAL_SEED", "0")
        run = evaluated("test", fitted)
    return folder / run, printed.getvalue()


def evaluated(subcommand, fitted, *arguments):
    """Run a subcommand on the fitted model below the working directory; returns its run folder."""
    checkpoint = f"--ckpt_path={fitted / 'checkpoints' / 'last.ckpt'}"
    command(subcommand, "--config", str(fitted / "config.yaml"), *QUIET, checkpoint, *arguments)
    return Path("runs/digits_lenet5_vogn/version_0")


def logged(folder):
    with (folder / "metrics.csv").open() as file:
        return {key: float(value) for row in csv.DictReader(file) for key, value in row.items() if value}


# -- one run ----------------------------------------------------------------------------------------------------------


def test_fit_leaves_config_metrics_and_a_posterior(fitted):
    assert yaml.safe_load((fitted / "config.yaml").read_text("utf-8"))["trainer"]["max_epochs"] == 3
    assert "val/cls/NLL" in logged(fitted)
    assert posterior_of(fitted).num_data == 1097


def test_fit_says_how_to_go_on(capsys, caplog):
    command("fit", "--config=digits+mlp+vogn", *QUIET, "--trainer.max_epochs=1", "--trainer.limit_train_batches=10")
    folder = "runs/digits_mlp_vogn/version_0"
    assert f"The run is in {folder}" in caplog.text
    assert (
        f"lightning-bayes test --config {folder}/config.yaml --ckpt_path {folder}/checkpoints/last.ckpt" in caplog.text
    )


def test_last_is_the_checkpoint_of_the_newest_run(fitted, monkeypatch):
    monkeypatch.chdir(fitted.parents[2])
    command("test", "--config", "digits+lenet5+vogn", *QUIET, "--ckpt_path=last", "--trainer.limit_test_batches=1")
    config = yaml.safe_load((fitted.with_name("version_1") / "config.yaml").read_text("utf-8"))
    assert config["ckpt_path"] == "runs/digits_lenet5_vogn/version_0/checkpoints/last.ckpt"
    assert config["trainer"]["max_epochs"] == 3  # of that run; the composition has 80


def test_a_test_with_other_settings_than_its_fit_is_remarked_on(fitted):
    options = ["--data.predict_dir=x", "--model.model.norm=batch", "--trainer.limit_test_batches=1"]
    message = (
        r"fitted with other settings \(.*config\.yaml\): model\.model\.norm is batch instead of none\. Pass --config"
    )
    with pytest.warns(UserWarning, match=message), pytest.raises(RuntimeError, match="Missing key"):
        evaluated("test", fitted, *options)


def test_a_fit_continues_the_last_run_with_its_settings(fitted, tmp_path, caplog):
    shutil.copytree(fitted.parents[1], tmp_path / "runs", dirs_exist_ok=True)
    command("fit", "--config", "digits+lenet5+vogn", *QUIET, "--trainer.max_epochs=4", "--ckpt_path=last")
    checkpoint = max(tmp_path.glob("runs/*/*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4 * 35
    assert "--ckpt_path=last is runs/digits_lenet5_vogn/version_" in caplog.text


def test_a_fit_without_a_last_run_starts_anew_and_says_so():
    options = ["--trainer.fast_dev_run=true", "--ckpt_path=last"]
    with pytest.warns(UserWarning, match="last found no run to continue"):
        command("fit", "--config", "digits+mlp+vogn", *QUIET, *options)


def test_a_stopped_fit_says_how_to_continue(monkeypatch, caplog):
    def stop(self):
        if self.current_epoch == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(BayesClassifier, "on_train_epoch_start", stop)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        command("fit", "--config", "digits+mlp+vogn", *QUIET)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores further interrupts
    folder = "runs/digits_mlp_vogn/version_0"
    assert f"The run is in {folder}. It was stopped. Continue it with" in caplog.text
    assert (
        f"lightning-bayes fit --config {folder}/config.yaml --ckpt_path {folder}/checkpoints/last.ckpt" in caplog.text
    )


def test_a_run_is_exported_and_served(fitted, capsys):
    command("export", str(fitted), "net.safetensors")
    assert capsys.readouterr().out.endswith('serve it with Predictor.load("net.safetensors")\n')
    images = torch.rand(3, 1, 8, 8)
    of_file, of_run = Predictor.load("net.safetensors"), Predictor.load(fitted)
    assert torch.equal(of_file(images).probs, of_run(images).probs)
    posterior = posterior_of(fitted).select("model.")
    expected = mc_predict(LeNet5(image_size=8), posterior, images, samples=32)
    torch.testing.assert_close(of_file(images).probs, expected.probs)
    assert of_file.saved.class_names == tuple("0123456789")
    assert of_file.saved.metrics["val/cls/NLL"] == pytest.approx(logged(fitted)["val/cls/NLL"])


def test_a_folder_that_is_no_run_is_not_exported():
    with pytest.raises(SystemExit, match=r"^lightning-bayes: RunError: nowhere is not the folder of a fit"):
        command("export", "nowhere", "net.safetensors")


def test_the_best_checkpoint_is_not_known_afterwards():
    with pytest.raises(SystemExit, match=r"--ckpt_path=best is known only while the fit runs. Pass --ckpt_path=last"):
        command("test", "--config", "digits+mlp+vogn", *QUIET, "--ckpt_path=best")


def test_laplace_needs_a_file_to_write_beside():
    with pytest.raises(
        SystemExit, match="ConfigError: laplace needs a trained checkpoint and saves its posterior next to it"
    ):
        command("laplace", "--config=digits+lenet5+adam", "--ckpt_path=last")


def test_no_last_checkpoint_is_an_error():
    message = r"^lightning-bayes: ConfigError: --ckpt_path=last found no run with a file checkpoints/last\.ckpt"
    with pytest.raises(SystemExit, match=message):
        command("test", "--config", "digits+mlp+vogn", *QUIET, "--ckpt_path=last")
    assert not Path("runs/digits_mlp_vogn/version_0").exists()


def test_test_averages_over_the_posterior(fitted, tested):
    folder, printed = tested
    found = logged(folder)
    (images, targets), module = digits(), network_of(fitted)
    averaged = mc_predict(module, posterior_of(fitted), images, samples=32).probs
    assert found["test/cls/NLL"] == pytest.approx(F.nll_loss(averaged.log(), targets).item(), rel=1e-4)
    assert found["test/cls/Acc"] == pytest.approx((averaged.argmax(-1) == targets).double().mean().item())
    at_mean = F.cross_entropy(module(images), targets).item()
    assert found["test/cls/NLL"] != pytest.approx(at_mean, rel=1e-4)
    assert printed.count("test/cls/NLL ") == 1
    assert f"{found['test/cls/NLL']:.4f}" in printed


def test_a_calibrated_test_prints_samples_and_mean_side_by_side(fitted, tested, capsys):
    """By the temperature that the fit has chosen."""
    folder = evaluated("test", fitted, "--trainer.callbacks+=Calibration")
    found = logged(folder)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "test/cls/NLL " in line]
    keys = ("test/cls/NLL", "test_mean/cls/NLL")
    assert re.findall(r"\d\.\d{4}", line) == [f"{found[key]:.4f}" for key in keys]
    assert found[keys[0]] == logged(tested[0])[keys[0]]
    (images, targets), posterior = digits(), posterior_of(fitted)
    nll = F.cross_entropy(network_of(fitted)(images) / posterior.temperature, targets).item()
    assert posterior.temperature != 1
    assert found[keys[1]] == pytest.approx(nll, rel=1e-4)  # the mean has the temperature too
    assert sorted(path.stem for path in (folder / "figures").iterdir()) == [
        "ood_scores",
        "reliability",
        "risk_coverage",
        "scores",
    ]


def test_report_compares_a_fit_and_its_test(fitted, tested, capsys):
    folder, _ = tested
    command("report", str(fitted), str(folder), "--output", "pages/both.html")
    assert capsys.readouterr().out == "wrote pages/both.html\n"
    page = Path("pages/both.html").read_text("utf-8")
    assert f"{logged(folder)['test/cls/NLL']:.4f}" in page
    assert f"{logged(fitted)['val/cls/NLL']:.4f}" in page


def test_validate_repeats_the_last_validation_of_the_fit(fitted, capsys):
    """Under as many samples, and at the temperature that the fit has chosen after it."""
    evaluated("validate", fitted, "--trainer.callbacks.eval_samples=3")
    posterior, module, data = posterior_of(fitted), network_of(fitted), DigitsDataModule()
    data.setup("validate")
    images, targets = next(iter(DataLoader(data.val_set, len(data.val_set))))
    of_fit, found = (
        F.nll_loss(mc_predict(module, each, images, samples=3, link="classification").probs.log(), targets).item()
        for each in (posterior.posterior, posterior)
    )
    assert logged(fitted)["val/cls/NLL"] == pytest.approx(of_fit, rel=1e-4)
    assert re.search(r"val/cls/NLL +│ (\S+)", capsys.readouterr().out)[1] == f"{found:.4f}"


def test_predict_writes_what_the_test_has_measured(fitted, caplog):
    path = evaluated("predict", fitted) / "predictions.pt"
    assert f"are in {path}" in caplog.text
    table = torch.load(path, weights_only=True)
    label = table.pop("label")
    assert {name: list(value.shape) for name, value in table.items()} == {
        "probs": [1200, 10],
        "entropy": [1200],
        "mutual_information": [1200],
        "dataloader_idx": [1200],
        "index": [1200],
        "target": [1200],
    }
    assert label == [str(number) for number in table["probs"].argmax(1).tolist()]
    (images, labels), test = digits(), table["dataloader_idx"] == 0
    expected = mc_predict(network_of(fitted), posterior_of(fitted), images, samples=32)
    torch.testing.assert_close(table["probs"][test], expected.probs, rtol=1e-4, atol=1e-6)
    assert (table["probs"][test].argmax(-1) == labels[table["index"][test]]).double().mean() > 0.5
    assert (table["mutual_information"] >= 0).all()


def test_predict_reads_a_folder_of_images_and_writes_a_table(fitted):
    data = DigitsDataModule(eval_ood=False)
    data.setup("predict")
    ink = (data.test_set.tensors[0][:3, 0] * data.std + data.mean) * 255
    for number, image in enumerate(ink.round().to(torch.uint8)):
        Path(f"images/{number}").mkdir(parents=True)
        Image.fromarray(image.numpy()).save(f"images/{number}/digit.png")
    evaluated("predict", fitted, "--data.predict_dir=images", "--output=found/p.csv", "--reject_below=0.5")
    with Path("found/p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == [f"images/{number}/digit.png" for number in range(3)]
    expected = mc_predict(network_of(fitted), posterior_of(fitted), data.test_set.tensors[0][:3], samples=32)
    found = torch.tensor([[float(row[f"probs_{digit}"]) for digit in data.class_names] for row in rows])
    torch.testing.assert_close(found, expected.probs, atol=0.01, rtol=0)  # pixels were rounded to bytes
    assert [row["label"] for row in rows] == [data.class_names[c] for c in found.argmax(1)]
    assert [row["reject"] for row in rows] == [str(bool(p < 0.5)) for p in found.amax(1)]
    assert "target" not in rows[0]


def test_predict_finds_the_last_run_whatever_it_writes(fitted, tmp_path):
    shutil.copytree(fitted.parents[1], tmp_path / "runs")
    options = ["--ckpt_path=last", "--output=found/p.csv", "--data.eval_ood=false"]
    command("predict", "--config", "digits+lenet5+vogn", *QUIET, *options)
    with Path("found/p.csv").open() as file:
        assert max(float(row["mutual_information"]) for row in csv.DictReader(file)) > 0


def test_predictions_in_a_format_that_needs_a_package_are_refused_at_once(fitted, monkeypatch):
    monkeypatch.setattr("lightning_bayes.callbacks.evaluation.prediction_table.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^lightning-bayes: ModuleNotFoundError: p\.parquet needs pyarrow"):
        evaluated("predict", fitted, "--output=p.parquet")


def test_the_class_folders_are_counted_and_the_config_says_the_number(tmp_path):
    write_image_folder(tmp_path / "pictures", ("cat", "dog", "eel"))
    small = ["--data.root=pictures", "--data.num_workers=0", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    run = instantiate("image_folder+timm/resnet18+vogn", *small)
    assert (run.model.num_classes, run.model.model.num_classes) == (3, 3)
    saved = yaml.safe_load(run.parser.dump(run.config))["model"]["init_args"]
    assert (saved["num_classes"], saved["model"]["init_args"]["num_classes"]) == (3, 3)
    run = instantiate("image_folder+timm/resnet18+vogn", *small, "--model.num_classes=5")
    assert (run.model.num_classes, run.model.model.num_classes) == (5, 5)
    with pytest.raises(DatasetError, match="does not contain one folder of images per class"):
        instantiate("image_folder+timm/resnet18+vogn", *small, "--data.root=nowhere")


def test_a_failed_start_leaves_no_folder():
    arguments = ["fit", "--config=digits+lenet5+vogn", *QUIET, "--trainer.max_epochs=1", "--model.model.image_size=28"]
    with pytest.raises(SystemExit, match="ShapeError"):  # in the sanity check, when the folder is there
        command(*arguments)
    assert not list(Path().rglob("version_*"))


def test_quiet_evaluation_prints_no_table(fitted, capsys):
    evaluated("validate", fitted, "--verbose=false")
    assert "cls/NLL" not in capsys.readouterr().out


def test_the_saved_config_reloads_as_itself(fitted, capsys):
    status, said = refused(capsys, "fit", "--config", str(fitted / "config.yaml"), "--print_config")
    assert status == 0
    assert yaml.safe_load(said.out) == yaml.safe_load((fitted / "config.yaml").read_text("utf-8"))


def test_a_run_that_is_stopped_has_the_last_finished_epoch(monkeypatch):
    def stop(self):
        if self.current_epoch == 2:
            raise RuntimeError("the power went out")

    monkeypatch.setattr(BayesClassifier, "on_train_epoch_start", stop)
    with pytest.raises(RuntimeError, match="the power went out"):
        command("fit", "--config", "digits+mlp+vogn", *QUIET)
    (saved,) = Path("runs/digits_mlp_vogn/version_0/checkpoints").iterdir()
    assert saved.name == "last.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == 2 * 35


def test_a_config_that_is_there_is_not_overwritten():
    Path("config.yaml").write_text("mine")
    options = [*QUIET, "--trainer.logger=false", "--trainer.limit_test_batches=1"]
    with pytest.warns(UserWarning, match="test uses the weights"):
        command("test", "--config", "digits+lenet5+adam", *options)
    assert Path("config.yaml").read_text() == "mine"
    assert yaml.safe_load(Path("config-1.yaml").read_text())["trainer"]["max_epochs"] == 80


def test_short_class_names_and_options_of_the_callback(capsys):
    options = ["--trainer.callbacks+=OGNCallback", "--trainer.callbacks.mc_samples=2", "--data.batch_size=16"]
    _, said = refused(capsys, "fit", "--config", "digits+lenet5+adam", *options, "--print_config")
    config = yaml.safe_load(said.out)
    assert config["trainer"]["callbacks"][-1]["class_path"] == "lightning_bayes.OGNCallback"
    assert config["trainer"]["callbacks"][-1]["init_args"]["mc_samples"] == 2
    assert config["data"]["init_args"]["batch_size"] == 16


@pytest.mark.parametrize("name", [*(name for name in recipes() if "vogn" in name), "digits+mlp+vogn"])
def test_options_reach_the_callback_of_a_packaged_config(name, capsys):
    is_preset = name in recipes() and "from_preset" in recipes()[name].read_text("utf-8")
    where = "dict_kwargs" if is_preset else "init_args"  # a preset takes any argument of its callback
    option = f"--trainer.callbacks.{where}.mc_samples=2"
    _, said = refused(capsys, "fit", "--config", name, option, "--print_config")
    assert yaml.safe_load(said.out)["trainer"]["callbacks"][-1][where]["mc_samples"] == 2


def test_as_a_process():
    arguments = [*QUIET, "--trainer.fast_dev_run=true"]
    started = [sys.executable, "-m", "lightning_bayes", "fit", "--config", "digits+mlp+vogn", *arguments]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        started, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == 0, done.stderr
    assert "`max_steps=1` reached" in done.stderr


# -- configs by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--config", "digits+lenet5+vgn"], ["--config=digits+lenet5+vgn"]])
def test_an_unknown_config_is_refused_with_the_nearest_ones(arguments, capsys):
    status, said = refused(capsys, "fit", *arguments)
    assert status == 2
    assert said.err.startswith("lightning-bayes: There is no part 'vgn' of digits+lenet5+vgn, and no such file in ")
    assert "Did you mean vogn" in said.err
    assert said.err.count("\n") == 1


def test_an_unknown_command_is_refused_with_the_nearest_one(capsys):
    status, said = refused(capsys, "fti")
    assert status == 2
    assert said.err.startswith("lightning-bayes: There is no command fti. Did you mean fit?")


def test_instantiate_builds_and_ignores_the_arguments_of_the_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", "--its", "own"])  # Lightning would warn, and warnings are errors here
    run = instantiate("digits+mlp+vogn", *QUIET, "--trainer.logger.save_dir=elsewhere", "--seed_everything=5")
    assert run.trainer.log_dir == os.path.join("elsewhere", "digits_mlp_vogn", "version_0")
    again = instantiate("digits+mlp+vogn", *QUIET, "--seed_everything=5")
    for first, second in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(first, second)
    run.parser.save(run.config, "saved.yaml")
    assert instantiate("saved.yaml").datamodule.batch_size == 32


# -- refusals and help ------------------------------------------------------------------------------------------------


def test_a_data_set_that_is_not_there_is_named(tmp_path):
    message = rf"^lightning-bayes: DatasetError: MNIST is missing or incomplete in {tmp_path}/nowhere.*download=True"
    with pytest.raises(SystemExit, match=message):
        command("fit", "--config", "mnist+lenet5+vogn", *QUIET, "--data.root=nowhere")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--trainer.callbacks.mc_samples=0", "HyperparameterError: mc_samples=0 must be a whole number of at least 1."),
        ("--model.num_classes=1", "HyperparameterError: BayesClassifier got num_classes=1, but needs at least 2"),
        ("--model.model.image_size=9", "HyperparameterError: LeNet5 got image_size=9, but supports 8, 28, 32"),
    ],
)
def test_a_value_out_of_range_is_refused_in_the_words_of_its_class(option, message):
    with pytest.raises(SystemExit, match=f"^lightning-bayes: {message}"):
        command("fit", "--config", "digits+lenet5+vogn", *QUIET, option)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--trainer.nonsense=1", "--trainer.nonsense=1"),
        (
            "--trainer.max_epoch=1",
            r"unrecognized arguments: --trainer.max_epoch=1\nDid you mean --trainer.max_epochs\?",
        ),
        ("--trainer.callbacks.mc_sample=2", r"Option 'mc_sample' is not accepted\nDid you mean mc_samples\?"),
        ("--trainer.callbacks.engine=faster", r"Expected a typing.Literal\['fused', 'backpack'\]. Got value: faster"),
        ("--model=BayesClasifier", "BayesClasifier"),
        ("--data.batchsize=3", "batchsize"),
        ("--model.model.name=resnet19", r"ResNet18':\nOption 'name' is not accepted\nIts arguments are: num_classes,"),
    ],
)
def test_arguments_that_do_not_parse_are_named(option, message, capsys):
    network = "resnet18" if "resnet" in option else "lenet5"
    status, said = refused(capsys, "fit", "--config", f"digits+{network}+vogn", option)
    assert status == 2
    assert re.search(message, said.err)
    assert said.err.startswith("lightning-bayes fit: ")
    assert said.err.count("\n") <= 6


def test_debug_prints_the_whole_message(capsys):
    status, said = refused(capsys, "fit", "--config", "digits+lenet5+vogn", "--debug", "--data.batchsize=3")
    assert status == 2
    assert "error: Parser key" in said.err
    assert "Subtypes: " in said.err


def test_a_checkpoint_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match=r"^lightning-bayes: ConfigError: Checkpoint nowhere.ckpt does not exist "):
        command("test", "--config", "digits+mlp+vogn", *QUIET, "--trainer.logger=false", "--ckpt_path=nowhere.ckpt")


def test_a_package_that_is_not_installed_is_named():
    logger = ["--trainer.logger=lightning.pytorch.loggers.CometLogger", "--trainer.max_epochs=1"]
    with pytest.raises(SystemExit, match=r"^lightning-bayes: ModuleNotFoundError: .*comet"):
        command("fit", "--config", "digits+mlp+vogn", *QUIET, *logger)


def test_version(capsys):
    command("--version")
    assert capsys.readouterr().out == f"lightning-bayes {version('lightning-bayes')}\n"


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("configs", r"^osawa2019_cifar10_lenet_vogn +LeNet-5 on unaugmented CIFAR-10"),
        ("data", r"^digits +scikit-learn's digits"),
        ("models", r"^timm/NAME +any model of timm$"),
        ("methods", r"^vogn +VOGN: the optimizer updates the mean"),
        ("presets", r"^osawa2019-cifar10-lenet +VOGNCallback.from_preset\('osawa2019-cifar10-lenet'\)$"),
    ],
)
def test_list_prints_a_line_for_each(kind, line, capsys):
    command("list", kind)
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


class Damaged(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise DataError("x.png is truncated.\nRemove it.")


@pytest.mark.parametrize(
    ("arguments", "buffering", "status"),
    [
        ("list models", "", 141),
        ("list models", "1", 141),
        ("--help", "", 141),
        ("report --help", "", 141),
        ("fit --help", "", 0),  # whose parser passes over what it cannot write
    ],
)
def test_printing_ends_quietly_once_nobody_reads(arguments, buffering, status):
    """As when `head` has read its lines; the output is buffered unless PYTHONUNBUFFERED is set."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "lightning_bayes", *arguments.split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": buffering},
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, "")


def test_a_broken_pipe_elsewhere_keeps_its_traceback(monkeypatch):
    def broken(kind):
        raise BrokenPipeError("of a process that loads data")

    monkeypatch.setattr("lightning_bayes.cli.commands._entries", broken)
    monkeypatch.setattr(sys, "argv", ["lightning-bayes", "list", "models"])
    with pytest.raises(BrokenPipeError, match="of a process that loads data"):
        main()


def test_an_error_in_a_process_that_loads_data_is_told_without_its_traceback(monkeypatch):
    monkeypatch.setattr(bayes_cli, "BayesCLI", lambda *_, **options: list(DataLoader(Damaged(), num_workers=1)))
    with pytest.raises(SystemExit, match=r"^lightning-bayes: DataError: x\.png is truncated\.\nRemove it\.$"):
        command("fit")


def test_an_error_of_another_kind_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(bayes_cli, "BayesCLI", lambda *_, **options: Path("nowhere.csv").read_text())
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv"):
        command("test")


def test_help_names_all_commands(capsys):
    command("--help")
    usage, *_ = said = capsys.readouterr().out.splitlines()
    assert usage == "usage: lightning-bayes fit|validate|test|predict|laplace|export|report|list|demo [arguments]"
    assert any("lightning-bayes fit --config digits+lenet5+vogn" in line for line in said)


@pytest.mark.parametrize("kind", ["configs", "data", "models", "methods"])
def test_list_names_all_packaged_configs(kind, capsys):
    command("list", kind)
    names = recipes() if kind == "configs" else known(kind)
    assert {*names} <= set(re.findall(r"^\S+", capsys.readouterr().out, re.M))


def test_names_of_the_list_are_those_of_the_registry():
    assert {*known("models")} == {*list_models()}
    assert {*known("data")} - {"imagenet"} == {*DATA}  # a layout of image_folder with a schedule


def test_help_of_fit_shows_trainer_model_and_data(capsys):
    status, said = refused(capsys, "fit", "--help")
    assert status == 0
    for option in (
        "--trainer.max_epochs",
        "--trainer.callbacks.help",
        "--model CONFIG",
        "--data CONFIG",
        "--ckpt_path",
    ):
        assert option in said.out


@pytest.mark.parametrize("name", ["VOGNCallback", "OGNCallback", "lightning_bayes.VOGNCallback"])
def test_help_of_a_callback_documents_every_argument(name, capsys):
    status, said = refused(capsys, "fit", f"--trainer.callbacks.help={name}")
    assert status == 0
    entries = said.out.partition("Help for")[2].split("  --trainer.callbacks.")[1:]
    described = {entry.split()[0]: " ".join(entry.split()[2:]) for entry in entries}
    for argument in DOCUMENTED:
        text = described[argument].partition("(type: ")[0]
        assert len(text.split()) >= 4, f"{argument} has no description"
        assert re.search(r"[Dd]efault|None", text), f"{argument} does not say its default"


def test_a_trained_checkpoint_gets_a_laplace_posterior(tmp_path):
    small = [*QUIET, "--trainer.max_epochs=2", "--trainer.limit_train_batches=20", "--model.model.hidden=[8]"]
    command("fit", "--config", "digits+mlp+adam", *small)
    (checkpoint,) = tmp_path.glob("runs/digits_mlp_adam/version_0/checkpoints/last.ckpt")
    laplace = ["--trainer.callbacks.prior_precision=3.0", "--trainer.callbacks.subset=all"]
    command("laplace", "--config", "digits+mlp+adam", "--ckpt_path", str(checkpoint), *small, *laplace)
    posterior = load_posterior(checkpoint.with_name("last-laplace.ckpt"))
    assert type(posterior).__name__ == "EigenGaussian"
    assert set(posterior.prior_precision.values()) == {3.0}
    assert len(posterior.mean) == 4
