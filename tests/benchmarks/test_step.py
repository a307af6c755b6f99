from __future__ import annotations

import json

import pytest
import torch

from benchmarks.speed import methods, setting, step, update
from benchmarks.speed.methods import METHODS
from benchmarks.speed.step import main
from lightning_bayes import VOGN

pytestmark = [
    pytest.mark.usefixtures("_tiny_models"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Extension saving to"),
]


@pytest.fixture
def result(tmp_path):
    def run(*arguments):
        path = tmp_path / "result.json"
        main([*arguments, "--batch", "4", "--rounds", "2", "--no-memory", "--json", str(path)])
        return json.loads(path.read_text("utf-8"))

    return run


def test_every_method_is_either_timed_or_named_with_a_reason(result, capsys):
    rows = result("--models", "tiny", "tiny-bn")["results"]
    printed = capsys.readouterr().out.splitlines()
    assert [(r["model"], r["method"]) for r in rows] == [(m, n) for m in ("tiny", "tiny-bn") for n in METHODS]
    for row, line in zip(rows, printed, strict=True):
        assert ("reason" in row) != ("seconds" in row)
        assert (f"not run: {row['reason']}" if "reason" in row else " ms ") in line
    assert {r["method"] for r in rows if "reason" in r} >= {"backpack-stock", "torch-func"}  # on BatchNorm


def test_keeps_machine_versions_commit_and_setting(result):
    found = result("--models", "tiny", "--methods", "vogn-fused", "--threads", "1")
    assert {"processor", "python", "torch", "commit", "opacus", "ivon-opt"} <= found.keys()
    assert [found[k] for k in ("device", "precision", "threads", "rounds")] == ["cpu", "32", 1, 2]
    assert [r["method"] for r in found["results"]] == ["adam", "vogn-fused"]  # the baseline always takes part
    assert found["results"][0]["ratio"] == 1


@pytest.mark.parametrize("where", ["build", "step"])
def test_a_method_that_fails_is_reported_with_its_message(where, result, monkeypatch):
    def broken(task):
        if where == "build":
            raise TypeError("cannot wrap this model")

        def run():
            raise TypeError("cannot wrap this model")

        return run

    monkeypatch.setitem(METHODS, "ivon", METHODS["adam"]._replace(build=broken))
    rows = {r["method"]: r for r in result("--models", "tiny", "--methods", "ivon", "vogn-fused")["results"]}
    assert rows["ivon"]["reason"] == "TypeError: cannot wrap this model"
    assert rows["vogn-fused"]["seconds"] > 0


def test_memory_is_measured_for_methods_that_ran_only(monkeypatch, capsys):
    asked = []

    def measure(model, batch, method, where):
        asked.append(method)
        return (12.5, "") if method == "adam" else (None, "the process was killed")

    monkeypatch.setattr(step, "measure_apart", measure)
    main(["--models", "tiny-bn", "--methods", "vogn-fused", "torch-func", "--rounds", "2"])
    assert asked == ["adam", "vogn-fused"]
    lines = capsys.readouterr().out.splitlines()
    assert "12.5 MiB" in lines[0]
    assert "no memory figure: the process was killed" in lines[1]


def test_fewer_rounds_are_said(capsys):
    row = {"model": "tiny", "batch": 4, "method": "opacus", "seconds": 1.0, "ratio": 5.0, "rounds": 3}
    assert step.in_words(row, 15).endswith("(3 of 15 rounds: slow)")
    assert "rounds" not in step.in_words(row, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_what_is_missing(capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert "--device cuda: torch" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "said"), [(None, "was built without CUDA"), ("12.4", "finds no GPU and driver")])
def test_a_missing_build_and_a_missing_gpu_are_told_apart(version, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", version)
    assert said in setting.missing_for("cuda")
    assert setting.missing_for("cpu") is None


def test_a_setting_survives_the_way_to_another_process():
    parser = step.make_parser()
    there = setting.Setting(precision="bf16-mixed", threads=torch.get_num_threads(), workspace_mib=8.0)
    assert setting.read_setting(parser, parser.parse_args(there.arguments())) == there


@pytest.mark.gpu
def test_runs_on_a_gpu(result):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    rows = result("--models", "tiny", "--methods", "vogn-fused", "--device", "cuda")["results"]
    assert all(r["seconds"] > 0 for r in rows)


def test_methods_share_one_learning_rate_and_number_of_data(tiny, setting, monkeypatch):
    """So that no method's figures come from another problem."""
    built = []

    def record(model, **arguments):
        built.append(VOGN(model, **arguments))
        return built[-1]

    monkeypatch.setattr(methods, "VOGN", record)
    task = methods.Task(tiny.build(), *2 * [torch.zeros(1)], setting)
    METHODS["vogn-fused"].build(task)
    METHODS["vogn-natural"].build(task)
    swapped, natural = (each.param_groups[0] for each in built)
    assert built[0].base_step.base.param_groups[0]["lr"] == swapped["lr"] == natural["lr"] == update.LR
    assert swapped["num_data"] == natural["num_data"] == update.NUM_DATA


def test_methods_are_named_apart_or_joined_by_commas(capsys):
    parser = step.make_parser()
    assert parser.parse_args(["--methods", "kfac,noisy_kfac", "ivon"]).methods == ["kfac", "noisy_kfac", "ivon"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--methods", "kfac,no-such,nor-this"])
    assert "--methods: unknown no-such, nor-this; choose from adam, " in capsys.readouterr().err


def test_k_fac_has_one_row_with_the_shares_of_its_step(result, capsys):
    rows = {row["method"]: row for row in result("--models", "tiny", "--methods", "kfac,noisy_kfac")["results"]}
    assert list(rows) == ["adam", "kfac", "noisy_kfac"]
    assert list(rows["noisy_kfac"]["shares"]) == ["statistics", "inversion", "sampling"]
    low, high = rows["noisy_kfac"]["quartiles"]
    assert low <= rows["noisy_kfac"]["ratio"] <= high
    assert "shares" not in rows["adam"]
    assert "[statistics " in capsys.readouterr().out.splitlines()[-1]


def test_processor_time_is_for_one_thread_of_the_cpu(result, capsys):
    assert result("--models", "tiny", "--methods", "ivon", "--threads", "1", "--clock", "cpu")["clock"] == "cpu"
    with pytest.raises(SystemExit):
        main(["--models", "tiny", "--threads", "2", "--clock", "cpu"])
    assert "--clock cpu compares steps of one thread on the CPU" in capsys.readouterr().err
