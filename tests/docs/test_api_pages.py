"""The generated API reference lists every public name exactly once."""

from __future__ import annotations

import importlib
import re
from inspect import signature
from pathlib import Path

import pytest

import lightning_bayes
from docs.site import api, arguments

ROOT = Path(__file__).parents[2]
PAGES = api.pages()
ENTRIES = re.findall(r"^::: (\S+)$", "\n".join(PAGES.values()), re.MULTILINE)


def public_packages():
    return ["lightning_bayes", *api.packages()]


def imported(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("package", public_packages())
def test_every_exported_name_has_an_entry(package):
    module = importlib.import_module(package)
    documented = set(ENTRIES)
    for name in module.__all__:
        item = api.Exported("lightning_bayes.public" if package == "lightning_bayes" else package, name)
        home = api.homes()[api.origin(item)]
        assert home.path in documented, f"{package}.{name} is missing from the API reference"
        assert imported(home.path) is getattr(module, name)


def test_every_package_with_exports_is_found():
    folders = [ROOT / "lightning_bayes", ROOT / "callbacks", ROOT / "zoo"]
    with_exports = {
        path for folder in folders for path in folder.rglob("__init__.py") if "__all__ = " in path.read_text("utf-8")
    }
    assert len({path.resolve() for path in with_exports}) == len(api.packages())


def test_no_object_is_documented_twice():
    assert len(ENTRIES) == len(set(ENTRIES))


def test_the_overview_links_every_top_name():
    for name in lightning_bayes.__all__:
        assert re.search(rf"^::: \S+\.{name}$|\[`{name}`\]\[", PAGES["api/index.md"], re.MULTILINE), name


def test_the_navigation_has_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert all(page in navigation for page in PAGES)


@pytest.mark.parametrize("callback", arguments.callbacks(), ids=lambda kind: kind.__name__)
def test_the_table_of_arguments_has_those_of_the_constructor(callback):
    with pytest.raises(TypeError, match=r"Its arguments are: ") as error:
        callback(no_such_argument=1)
    listed = str(error.value).partition("Its arguments are: ")[2].rstrip(".").split(", ")
    parameters = signature(callback.__init__).parameters.items()
    explicit = {name for name, p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}} - {"self"}
    assert set(arguments.arguments(callback)) == {*listed, *explicit}


def test_ranges_and_defaults_are_those_of_the_declaration():
    kind, words, default, _ = arguments.arguments(lightning_bayes.VOGNCallback)["mc_samples"]
    assert (kind, words, default) == ("int", "a whole number of at least 1", "`1`")
