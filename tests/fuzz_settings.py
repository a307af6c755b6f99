"""How many examples hypothesis draws: few and always the same in the fast suite, more with ``-m slow``."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

_QUIET = list(HealthCheck)


def fuzz(few, many, **strategies):
    """Run a test on `few` drawn examples, and its slow twin on `many`."""

    def decorate(test):
        def drawn(examples):
            return settings(
                max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=_QUIET
            )(given(**strategies)(test))

        counts = [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.slow)]

        @pytest.mark.parametrize("examples", counts)
        def run(examples):
            drawn(examples)()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
