"""What importing the package and asking for help loads: modules that are absent, not seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lightning_bayes


def loaded_by(code, *arguments):
    """Top-level names and modules that a fresh interpreter has loaded after `code`."""
    report = "import sys; print('LOADED', *sys.modules)"
    wrapped = f"import atexit; atexit.register(lambda: exec({report!r})); {code}"
    done = subprocess.run([sys.executable, "-c", wrapped, *arguments], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert lines, done.stderr
    return set(lines[-1].split()[1:])


REPORT = (
    "import sys, runpy; sys.argv = ['lightning-bayes', *sys.argv[1:]]; "
    "runpy.run_module('lightning_bayes', run_name='__main__')"
)


def test_the_help_of_a_report_loads_neither_torch_nor_lightning():
    loaded = loaded_by(REPORT, "report", "--help")
    assert "lightning_bayes.report.command" in loaded
    assert not loaded & {"torch", "lightning", "matplotlib", "jinja2"}


def test_the_version_loads_neither_torch_nor_lightning():
    assert not loaded_by(REPORT, "--version") & {"torch", "lightning", "matplotlib", "jinja2"}


def test_the_list_of_presets_loads_neither_torch_nor_lightning():
    assert not loaded_by(REPORT, "list", "presets") & {"torch", "lightning", "matplotlib", "jinja2"}


@pytest.mark.slow
def test_importing_the_package_loads_no_more_than_lightning_does():
    beside = loaded_by("import lightning_bayes") - loaded_by("import lightning")
    assert {name.partition(".")[0] for name in beside} == {"lightning_bayes"}
    assert not beside & {f"lightning_bayes.{room}" for room in ("zoo", "cli.bayes_cli", "cli.demo", "report")}


@pytest.mark.slow
def test_the_command_lines_help_loads_no_library_of_data_or_figures():
    beside = loaded_by(REPORT, "--help") - loaded_by("import lightning")
    assert not beside & {"timm", "matplotlib.pyplot", "sklearn", "pandas", "backpack"}


def test_names_of_the_package_are_there_in_a_report_too():
    code = "import sys; sys.argv = ['lightning-bayes', 'report']; import lightning_bayes; print(lightning_bayes.BayesError)"
    assert "lightning_bayes.public" in loaded_by(code)


def test_public_names_load_with_their_first_use_and_nothing_leaks():
    assert "torch" not in loaded_by("import lightning_bayes")
    assert "lightning_bayes.public" in loaded_by("import lightning_bayes; lightning_bayes.VOGNCallback")
    assert set(dir(lightning_bayes)) == {"__version__", *lightning_bayes.__all__}
    with pytest.raises(AttributeError, match="module 'lightning_bayes' has no attribute 'VOGNCalback'"):
        lightning_bayes.VOGNCalback  # noqa: B018  (it raises)
