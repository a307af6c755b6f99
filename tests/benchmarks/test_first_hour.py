"""The first hour takes its steps from README, in order, and stops where one fails."""

from __future__ import annotations

import sys

import pytest

from benchmarks import first_hour
from benchmarks.first_hour import Step


def test_the_steps_are_those_of_the_readme():
    code = first_hour.blocks("README.md", "python")
    compile(code, "README.md", "exec")
    assert "VOGNCallback()" in code
    assert "Predictor.load" in code
    assert [arguments[0] for arguments in first_hour.commands("README.md")] == ["fit", "test", "report"]


def test_steps_install_the_wheel_and_leave_the_repository(tmp_path):
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/lightning_bayes-1-py3-none-any.whl").touch()
    taken = [*first_hour.installation(tmp_path, reuse=False), *first_hour.readme(tmp_path)]
    assert taken[2].command[-1].endswith(".whl[demo]")
    assert all(step.command[0].startswith(str(tmp_path)) for step in taken[2:])
    assert "--no-deps" not in taken[2].command


def test_a_failing_step_is_named(tmp_path, capsys):
    steps = [Step("one", [sys.executable, "-c", "print(1)"]), Step("two", [sys.executable, "-c", "1 / 0"])]
    with pytest.raises(SystemExit, match=r"(?s)'two' fails.*ZeroDivisionError"):
        first_hour.run(steps, tmp_path)
    assert capsys.readouterr().out.endswith("s  one\n")
