"""Profile of a VOGN step, by phase and by layer.

    python -m benchmarks.speed.profile [--models lenet resnet18] [--batch 32] [--rounds 7] [--threads 2] [--device cpu|cuda]
        [--precision 32|bf16-mixed] [--json FILE]

Phases are timed in whole steps that alternate with plain passes. *curvature* is the time of a measured pass beyond noise and
a plain forward and backward. *draws* are the normal random numbers, one per weight; *sampling* is the remaining cost of the
noise. The floor is the minimum for any method that samples weights: the plain passes, Adam's update and the draws. It leaves
out per-example contributions, which all need as many multiplications as the weight gradient that they replace. Layers are
timed alone, with their input and output gradient in the model; the difference between all layers and the whole pass is
activations, pooling, additions and the loss.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.provenance import save_json
from benchmarks.speed.methods import default_vogn
from benchmarks.speed.models import MODELS, Task, make_task
from benchmarks.speed.rounds import WARM_UP, stopwatch
from benchmarks.speed.setting import Setting, add_arguments, read_setting
from benchmarks.speed.update import LR
from lightning_bayes import VOGN
from lightning_bayes.curvature import make_engine
from lightning_bayes.curvature.measured_modules import MeasuredModule, find_measured_modules
from lightning_bayes.optim.runtime.noise import CounterNoise

PHASES = ("draws", "sampling", "forward", "backward without curvature", "curvature", "update")
PLAIN = ("forward", "backward without curvature", "Adam's update")


@dataclass
class Call:
    """Input and output gradient of one layer in a pass."""

    unit: MeasuredModule
    x: Tensor
    grad_output: Tensor


@dataclass
class LayerTimes:
    """Median seconds of one layer alone."""

    layer: str
    weight: list[int]
    output: list[int]
    plain: float  # forward and backward
    measured: float  # the same with per-example squares

    @property
    def curvature(self) -> float:
        """Additional seconds for the squares."""
        return self.measured - self.plain


def profile_phases(task: Task, rounds: int) -> dict[str, float]:
    """Median seconds of each phase in `PHASES`, and of Adam's update."""
    optimizer = default_vogn(task, **task.setting.workspace())
    adam = torch.optim.Adam(task.model.parameters(), lr=LR)
    numbers = [torch.empty_like(param) for param in task.model.parameters()]
    timed = stopwatch(task.setting.synchronise)
    measured = [_phases_once(task, optimizer, adam, numbers, timed) for _ in range(rounds + WARM_UP)][WARM_UP:]
    return {phase: statistics.median(seconds[phase] for seconds in measured) for phase in measured[0]}


def _phases_once(
    task: Task,
    optimizer: VOGN,
    adam: torch.optim.Adam,
    numbers: list[Tensor],
    timed: Callable[[Callable[[], None]], float],
) -> dict[str, float]:
    losses: list[Tensor] = []

    def sample() -> None:
        with torch.no_grad(), optimizer.sampled_params():
            pass

    def measured_pass() -> None:
        with optimizer.sampled_params():
            task.loss().backward()

    seconds = {"draws": timed(lambda: CounterNoise(0).fill_(numbers))}
    seconds["sampling"] = timed(sample) - seconds["draws"]
    seconds["forward"] = timed(lambda: losses.append(task.loss()))
    seconds["backward without curvature"] = timed(lambda: losses[0].backward())
    update = timed(lambda: adam.step())
    optimizer.zero_grad()
    seconds["curvature"] = timed(measured_pass) - sum(seconds.values())
    seconds["update"] = timed(lambda: optimizer.step())
    return {**seconds, "Adam's update": update}


def floor_and_ratio(phases: dict[str, float]) -> tuple[float, float]:
    """The floor, the minimum for any method that samples weights, and VOGN's step, both in units of Adam's step."""
    plain = sum(phases[name] for name in PLAIN)
    return 1 + phases["draws"] / plain, sum(phases[name] for name in PHASES) / plain


def record_calls(task: Task) -> list[Call]:
    """Input and output gradient of every layer with parameters in one plain pass, in forward order."""
    calls: list[Call] = []
    handles = [unit.module.register_forward_hook(_recorder(unit, calls)) for unit in find_measured_modules(task.model)]
    try:
        task.loss().backward()
    finally:
        for handle in handles:
            handle.remove()
    task.model.zero_grad()
    return calls


def _recorder(unit: MeasuredModule, calls: list[Call]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def record(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0].detach().requires_grad_(inputs[0].requires_grad)
        call = Call(unit, x, torch.empty(0))
        calls.append(call)
        output.register_hook(lambda grad: setattr(call, "grad_output", grad.detach()))

    return record


def profile_layer(call: Call, setting: Setting, rounds: int) -> LayerTimes:
    """Median seconds of one layer alone; plain and measured passes alternate."""
    module = call.unit.module
    engine = make_engine("fused", module, **setting.workspace())
    timed = stopwatch(setting.synchronise)
    seconds: dict[str, list[float]] = {"plain": [], "measured": []}
    for _ in range(rounds + WARM_UP):
        seconds["plain"].append(timed(lambda: _run(call, setting, nullcontext())))
        seconds["measured"].append(timed(lambda: _run(call, setting, engine.capture())))
    plain, measured = (statistics.median(values[WARM_UP:]) for values in seconds.values())
    weight = next(module.parameters())
    return LayerTimes(call.unit.label, list(weight.shape), list(call.grad_output.shape), plain, measured)


def _run(call: Call, setting: Setting, capture: AbstractContextManager[Any]) -> None:
    call.x.grad = None
    call.unit.module.zero_grad()
    with capture:
        with torch.autocast(setting.device, dtype=torch.bfloat16, enabled=setting.precision == "bf16-mixed"):
            output = call.unit.module(call.x)
        output.backward(call.grad_output)


def phase_lines(phases: dict[str, float]) -> Iterator[str]:
    """Format the table of phases."""
    total = sum(phases[phase] for phase in PHASES)
    yield f"{'phase':28} {'ms':>9} {'share':>7}"
    for phase in PHASES:
        yield f"{phase:28} {phases[phase] * 1e3:9.2f} {phases[phase] / total:7.1%}"
    floor, ratio = floor_and_ratio(phases)
    yield f"{'sum':28} {total * 1e3:9.2f}   {ratio:.2f} × Adam's step, with {floor:.2f} for the draws alone"


def layer_lines(layers: list[LayerTimes]) -> Iterator[str]:
    """Format the table of layers."""
    total = LayerTimes("all layers", [], [], sum(x.plain for x in layers), sum(x.measured for x in layers))
    width = max(len(x.layer) for x in [*layers, total])
    yield f"{'layer':{width}} {'weight':18} {'output':18} {'plain ms':>9} {'+ curvature':>11} {'ratio':>6}"
    for x in [*layers, total]:
        times = f"{x.plain * 1e3:9.3f} {x.curvature * 1e3:11.3f} {x.measured / x.plain:6.2f}"
        yield f"{x.layer:{width}} {x.weight or ''!s:18} {x.output or ''!s:18} {times}"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18"], choices=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    add_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Print both tables of each model; write JSON if requested."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    setting = read_setting(parser, options)
    profiles = {}
    for model in options.models:
        print(f"{MODELS[model].title}, batch {options.batch}")
        profiles[model] = _profile(model, options.batch, options.rounds, setting)
    header = {**setting.describe(), "batch": options.batch, "rounds": options.rounds}
    save_json(options.json, {**header, "profiles": profiles})


def _profile(model: str, batch: int, rounds: int, setting: Setting) -> dict[str, Any]:
    task = make_task(MODELS[model], batch, setting)
    phases = profile_phases(task, rounds)
    print("\n".join(phase_lines(phases)) + "\n", flush=True)
    layers = [profile_layer(call, setting, rounds) for call in record_calls(task)]
    print("\n".join(layer_lines(layers)) + "\n", flush=True)
    return {"phases": phases, "layers": [asdict(layer) for layer in layers]}


if __name__ == "__main__":
    main()
