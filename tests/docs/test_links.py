"""Relative links and anchors of README and docs lead somewhere, checked without the tool that builds the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GENERATED = {"api/index.md", "changelog.md", "contributing.md"}  # pages of the site without a file in docs/
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(text):
    """The text without blocks and spans of code, in which brackets are not links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text):
    """Ids of the headings, as GitHub and Python-Markdown make them of these headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def is_tutorial(path):
    return path.startswith("tutorials/") and (ROOT / "docs" / path).with_suffix(".py").exists()


def broken(page, text):
    for target in LINK.findall(prose(text)):
        path, _, anchor = target.partition("#")
        if "://" in target or path in GENERATED or is_tutorial(path):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{target}: there is no such file"
        elif anchor and anchor not in anchors(file.read_text("utf-8")):
            yield f"{target}: {file.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert list(broken(page, page.read_text("utf-8"))) == []


def test_a_broken_link_is_found():
    page = ROOT / "docs" / "evaluation.md"
    text = (
        "[a](finetuning.md#batchnorm) [b](nowhere.md) [c](finetuning.md#nothing) `[d](code.md)` [e](#scores)\n## Scores"
    )
    assert [found.partition(":")[0] for found in broken(page, text)] == [
        "nowhere.md",
        "finetuning.md#nothing",
        "#scores",
    ]


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert re.search(rf"[ :]{page.name}$", navigation, re.MULTILINE), f"{page.name} is not in mkdocs.yml"
