"""Lets ``Example:`` in docstrings be the section that Griffe knows as ``Examples:``, so that doctests are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DoctestSections(griffe.Extension):
    """Renames the section before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring.

        Args:
            obj: Whatever has it.
        """
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
