"""The calibration that a callback adds beside itself."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer

from lightning_bayes.callbacks.calibration import Calibration
from lightning_bayes.callbacks.calibration_base import CalibrationCallback
from lightning_bayes.callbacks.calibration_lenient import LenientCalibration
from lightning_bayes.callbacks.evaluation import FinishesSamples
from lightning_bayes.callbacks.neighbours import callbacks_of, insert_after
from lightning_bayes.errors import UnsupportedTrainingError


def calibration_of(calibrate: bool | None, lr: object) -> CalibrationCallback | None:
    """The calibration of an argument; None chooses a temperature in the default step, which has no `lr`."""
    if calibrate is None:
        return LenientCalibration() if lr is None else None
    return Calibration() if calibrate else None


def beside(trainer: Trainer, callback: Callback, calibration: CalibrationCallback) -> None:
    """Put the calibration of a callback behind all that finish samples; its hooks run before the checkpoint's."""
    others = [other for other in callbacks_of(trainer, CalibrationCallback) if other is not calibration]
    if others and isinstance(calibration, LenientCalibration):
        return
    if others:
        raise UnsupportedTrainingError(
            "calibrate=True and Calibration both choose the width of the posterior. Remove one of them."
        )
    callbacks = callbacks_of(trainer, Callback)
    if calibration not in callbacks and callback in callbacks:
        finishing = [other for other in callbacks if isinstance(other, FinishesSamples)]
        insert_after(trainer, calibration, callback, *finishing)
