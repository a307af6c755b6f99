"""Every tutorial runs and is rendered with its output and figures."""

from __future__ import annotations

import re

import pytest

from docs.site import tutorials

SMALL = """# requires: a_package_that_nobody_has
# %% [markdown]
# # Title
#
# Text with `code`.

# %%
print("one", 1)

# %%
from pathlib import Path

Path("b.png").write_bytes(b"picture")
"""


def source(name):
    return (tutorials.FOLDER / f"{name}.py").read_text("utf-8")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Folder with one small tutorial."""
    monkeypatch.setattr(tutorials, "FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1_small.py").write_text(SMALL.partition("\n")[2], "utf-8")
    (tmp_path / "out").mkdir()
    return tmp_path


def test_there_are_eight_in_the_navigation():
    navigation = (tutorials.ROOT / "mkdocs.yml").read_text("utf-8")
    assert len(tutorials.names()) == 8
    assert re.findall(r"tutorials/(\w+)\.md$", navigation, re.MULTILINE) == tutorials.names()


def test_cells_know_their_lines():
    text, first, second = tutorials.cells(SMALL)
    assert (text.is_code, text.text) == (False, "# Title\n\nText with `code`.")
    assert (first.is_code, first.line, first.text) == (True, 8, 'print("one", 1)')
    assert second.line == 11


def test_outputs_and_figures_follow_their_cell(small):
    tutorials.run("1_small", small / "out")
    page = (small / "out/1_small.md").read_text("utf-8")
    assert page.index('print("one", 1)\n```') < page.index("\none 1\n```") < page.index("(1_small_b.png)")
    assert (small / "out/1_small_b.png").read_bytes() == b"picture"


def test_outputs_are_kept_until_the_source_changes(small, monkeypatch):
    monkeypatch.setattr(tutorials, "CACHE", small / "kept")
    runs = []

    def render(name, out):
        runs.append(name)
        out.mkdir(parents=True)
        (out / f"{name}.md").write_text("page", "utf-8")

    monkeypatch.setattr(tutorials, "render", render)
    first = tutorials.cached("1_small")
    assert tutorials.cached("1_small") == first
    assert runs == ["1_small"]
    (small / "1_small.py").write_text("# %%\nprint(2)\n", "utf-8")
    assert tutorials.cached("1_small") != first
    assert len(runs) == 2
    assert not first[0].exists()


def test_a_missing_package_is_named_and_nothing_runs(small):
    (small / "1_small.py").write_text(SMALL, "utf-8")
    tutorials.run("1_small", small / "out")
    page = (small / "out/1_small.md").read_text("utf-8")
    assert "lacks a_package_that_nobody_has" in page
    assert "\none 1\n" not in page


def test_a_failure_shows_the_line(small):
    (small / "1_small.py").write_text("# %%\nprint(1)\n\n# %%\n1 / 0\n", "utf-8")
    with pytest.raises(ZeroDivisionError) as error:
        tutorials.run("1_small", small / "out")
    assert error.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize("name", tutorials.names())
def test_code_compiles_and_begins_with_a_title(name):
    first, *rest = tutorials.cells(source(name))
    assert first.text.startswith(f"# {name[0]}. ")
    assert [compile(cell.text, name, "exec") for cell in rest if cell.is_code]


@pytest.mark.slow
@pytest.mark.parametrize("name", tutorials.names())
def test_tutorials_run(name, tmp_path):
    if lacking := tutorials.missing(source(name)):
        pytest.skip(f"{', '.join(lacking)} is not installed")
    assert "```" in tutorials.render(name, tmp_path).read_text("utf-8")
