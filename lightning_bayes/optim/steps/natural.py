"""The natural step: the algorithm's own update, as published."""

from __future__ import annotations

from typing import final

from lightning_bayes.optim.steps.step import CohortUpdate, Step, decay_


@final
class NaturalStep(Step):
    """Applies the algorithm's own update with the learning rate of the group."""

    is_published = True

    def apply(self, update: CohortUpdate) -> None:
        """Update one cohort; see `Step`."""
        decay_(update)
        update.move_()
