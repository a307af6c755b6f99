"""The first hour takes its steps from README, in order, stops where one fails, and runs what a newcomer does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.first_hour import readme, tasks
from benchmarks.first_hour.readme import Step


def test_the_steps_are_those_of_the_readme():
    code = readme.blocks("README.md", "python")
    compile(code, "README.md", "exec")
    assert "VOGNCallback()" in code
    assert "Predictor.load" in code
    assert [arguments[0] for arguments in readme.commands("README.md")] == ["fit", "test", "report"]


def test_steps_install_the_wheel_and_leave_the_repository(tmp_path):
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/lightning_bayes-1-py3-none-any.whl").touch()
    taken = [*readme.installation(tmp_path, reuse=False), *readme.readme(tmp_path)]
    assert taken[2].command[-1].endswith(".whl[demo]")
    assert all(step.command[0].startswith(str(tmp_path)) for step in taken[2:])
    assert "--no-deps" not in taken[2].command


def test_a_failing_step_is_named(tmp_path, capsys):
    steps = [Step("one", [sys.executable, "-c", "print(1)"]), Step("two", [sys.executable, "-c", "1 / 0"])]
    with pytest.raises(SystemExit, match=r"(?s)'two' fails.*ZeroDivisionError"):
        readme.run(steps, tmp_path)
    assert capsys.readouterr().out.endswith("s  one\n")


def test_every_task_has_a_script_that_marks_what_is_added_and_shown():
    for name in tasks.TASKS:
        text = (tasks.NEWCOMER / name).read_text("utf-8")
        assert text.index("# added\n") < text.index("# shown\n")
        if name.endswith(".py"):
            compile(text, name, "exec")
        assert 1 < tasks.added_lines(tasks.NEWCOMER / name) < 10


def test_a_task_tells_its_last_line_and_a_failure_its_error(tmp_path, monkeypatch):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "digits.py").touch()
    (scripts / "good.py").write_text("# added\nvalue = 1\n\n# shown\nprint('first')\nprint('a | b')\n")
    (scripts / "bad.py").write_text("# added\n# shown\nraise ValueError('no')\n")
    monkeypatch.setattr(tasks, "NEWCOMER", scripts)
    monkeypatch.setattr(tasks, "TASKS", {"good.py": "good", "bad.py": "bad"})
    (tmp_path / "bin").mkdir()
    os.symlink(sys.executable, tmp_path / "bin" / "python")
    good, bad = tasks.run_tasks(tmp_path, Path(tmp_path / "work"))
    assert (good.title, good.lines, good.printed) == ("good", 1, "a | b")
    assert bad.printed == "fails: ValueError: no"
    assert tasks.table([good]).endswith(f"| good | 1 | {good.seconds:.0f} | a , b |")
