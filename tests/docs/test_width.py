"""Code in pages is not cut at the width of a laptop's browser, 1280 px."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 88
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```(?:python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_of_code_fit(page):
    lines = [line for block in CODE.findall(page.read_text("utf-8")) for line in block.splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []
