from __future__ import annotations

import math
import os

import pytest
import yaml

from lightning_bayes.errors import RunError
from lightning_bayes.report import read_run, read_runs
from lightning_bayes.report.runs import named


def write_run(folder, lines, config=None):
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


ROWS = ["epoch,step,train/loss,val/cls/Acc", "0,9,1.5,", "0,10,,0.4", "1,19,0.5,", "1,20,,0.6"]


def test_the_last_value_and_the_history_of_each_metric_are_read(tmp_path):
    run = read_run(write_run(tmp_path / "a", ROWS), "a")
    assert run.last == {"train/loss": 0.5, "val/cls/Acc": 0.6}
    assert run.series["val/cls/Acc"] == [(0, 0.4), (1, 0.6)]
    assert (run.config, run.config_text, run.figures, run.checkpoints) == ({}, "", {}, [])


def test_without_an_epoch_the_step_counts(tmp_path):
    run = read_run(write_run(tmp_path / "a", ["step,loss", "3,1.0"]), "a")
    assert run.series == {"loss": [(3, 1.0)]}


def test_nan_is_a_value(tmp_path):
    assert math.isnan(read_run(write_run(tmp_path / "a", ["epoch,x", "0,nan"]), "a").last["x"])


def test_config_is_flat_and_figures_and_checkpoints_are_found(tmp_path):
    folder = write_run(
        tmp_path / "a", ROWS, {"model": {"lr": 0.1, "layers": [1, {"width": 2}], "empty": {}}, "seed": 0}
    )
    for name in ("figures/b.png", "figures/a.png", "checkpoints/last.ckpt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    run = read_run(folder, "a")
    assert run.config == {
        "model.lr": 0.1,
        "model.layers.0": 1,
        "model.layers.1.width": 2,
        "model.empty": {},
        "seed": 0,
    }
    assert list(run.figures) == ["a", "b"]
    assert [path.name for path in run.checkpoints] == ["last.ckpt"]


def test_a_config_cannot_run_code(tmp_path):
    folder = write_run(tmp_path / "a", ROWS)
    (folder / "config.yaml").write_text("x: !!python/object/apply:os.getcwd []")
    with pytest.raises(RunError, match=r"config\.yaml is not plain YAML: could not determine a constructor"):
        read_run(folder, "a")


def test_a_folder_of_runs_gives_its_versions_in_their_order(tmp_path):
    for number in (10, 2, 0):
        write_run(tmp_path / "lenet" / f"version_{number}", ROWS)
    assert [run.name for run in read_runs([tmp_path / "lenet"])] == ["version_0", "version_2", "version_10"]


def test_a_folder_of_folders_gives_the_runs_of_each(tmp_path):
    for name in ("vogn/version_10", "vogn/version_2", "adam/version_0"):
        write_run(tmp_path / "runs" / name, ROWS)
    names = [run.name for run in read_runs([tmp_path / "runs"])]
    assert names == ["adam/version_0", "vogn/version_2", "vogn/version_10"]


def test_names_are_the_parts_in_which_paths_differ_and_no_run_is_read_twice(tmp_path):
    adam = write_run(tmp_path / "runs" / "adam" / "version_0", ROWS)
    vogn = write_run(tmp_path / "runs" / "vogn" / "version_0", ROWS)
    assert [run.name for run in read_runs([adam, vogn, adam])] == ["adam/version_0", "vogn/version_0"]
    assert [run.name for run in read_runs([adam])] == ["adam/version_0"]


def test_a_run_and_its_own_subfolder_have_different_names(tmp_path):
    outer = write_run(tmp_path / "outer", ROWS)
    inner = write_run(outer / "outer", ROWS)
    assert [run.name for run in read_runs([outer, inner])] == ["outer", "outer/outer"]


def test_folders_are_those_that_were_given(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "adam", ROWS)
    monkeypatch.chdir(tmp_path)
    (run,) = read_runs(["runs"])
    assert str(run.folder) == os.path.join("runs", "adam")


def test_folders_without_a_run_are_all_named(tmp_path):
    good = write_run(tmp_path / "a", ROWS)
    message = (
        r"no run in .*/nothing, .*/missing: a run is a folder with metrics\.csv, which Lightning's CSVLogger writes"
    )
    (tmp_path / "nothing").mkdir()
    with pytest.raises(RunError, match=message):
        read_runs([tmp_path / "nothing", good, tmp_path / "missing"])


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    folder = write_run(tmp_path / "a", [*ROWS, "2,29,oops,"])
    with pytest.raises(RunError, match=r"metrics\.csv, line 6, train/loss is 'oops', not a number"):
        read_run(folder, "a")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", b"a: [1\n", r"config\.yaml is not plain YAML: while parsing.*Repair or delete it"),
        ("config.yaml", b"3\n", r"config\.yaml contains 3 instead of a mapping of settings\. Repair"),
        ("config.yaml", b"- 1\n- b\n", r"config\.yaml contains \[1, 'b'\] instead of a mapping"),
        ("config.yaml", b"a: \xe4\n", r"config\.yaml cannot be read: 'utf-8' codec.*leave its run out of the report"),
        ("metrics.csv", b"epoch,\xe4\n0,1\n", r"metrics\.csv cannot be read: 'utf-8' codec can't decode byte 0xe4"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    folder = write_run(tmp_path / "a", ROWS)
    (folder / name).write_bytes(content)
    with pytest.raises(RunError, match=f"(?s){message}"):
        read_run(folder, "a")


def test_a_report_names_runs_by_folder_and_runs_of_one_folder_by_the_setting_that_differs(tmp_path):
    folders = {"vogn/version_0": 1, "vogn/version_3": 2, "adam/version_0": 1}
    runs = [write_run(tmp_path / name, ROWS, {"seed_everything": seed, "lr": 0.1}) for name, seed in folders.items()]
    assert [run.name for run in named(read_runs(runs))] == ["vogn, seed 1", "vogn, seed 2", "adam"]
    same = [write_run(tmp_path / "sgd" / f"version_{number}", ROWS, {"lr": 0.1}) for number in (0, 1)]
    assert [run.name for run in named(read_runs(same))] == ["version_0", "version_1"]
