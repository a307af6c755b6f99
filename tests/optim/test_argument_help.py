"""The help of declared arguments against lines written by hand."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from lightning_bayes.optim.argument_help import argument_help, with_arguments
from lightning_bayes.optim.settings import POSITIVE, Setting


class Own(TypedDict, total=False):
    """Arguments of a method.

    Attributes:
        width: Width of the posterior (σ vs. the prior's); later parts
            are not in the help. Nor are later sentences. None takes the prior's.
        rule: How it moves.
        quick: Whether it is quick.
    """

    width: Annotated[float | None, Setting(POSITIVE, None, optional=True)]
    rule: Annotated[Literal["a", "b"], Setting(default="a")]
    quick: Annotated[bool, Setting(default=False)]


def test_a_line_has_the_first_part_of_the_first_sentence_the_range_and_the_default():
    assert with_arguments("Title.", argument_help(Own, defaults={})).splitlines() == [
        "Title.",
        "",
        "Keyword arguments, with range and default:",
        "    quick: Whether it is quick (True or False; default False).",
        "    rule: How it moves ('a' or 'b'; default 'a').",
        "    width: Width of the posterior (σ vs. the prior's) (above 0; default None takes the prior's).",
    ]


def test_the_default_of_a_class_comes_before_the_declared_one():
    assert argument_help(Own, defaults={"rule": "b"})["rule"].default == "'b'"
