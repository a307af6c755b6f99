"""All measurements that need a GPU, in resumable parts of at most nine minutes.

    python -m benchmarks.gpu [--data FOLDER] [--parts tests speed-32 …] [--minutes 9] [--folder benchmarks/results/gpu]

Each part is a separate process. ``parts.json`` in the folder stores its status: a finished part is not run again, and a part
that was cut off continues from its own results. ``FOLDER`` contains ``cifar-10-batches-py``. The parts:

    tests               the tests that need a GPU
    speed-32, speed-bf16-mixed    steps of every method at batch sizes 128 and 512, see `benchmarks.speed.targets`
    evaluation          S posterior samples compared with S forward passes
    cifar10-adam, -sgd, -vogn     ResNet-18 on CIFAR-10, as many epochs as the time allows; --again continues from the last
    checkpoint

Without a GPU, every part is skipped with the reason. ``--device cpu --tiny`` tests the command itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.speed.setting import PRECISIONS, missing_for

ROOT = Path(__file__).parents[1]
METHODS = ("adam", "sgd", "vogn")
PARTS = ("tests", *(f"speed-{p}" for p in PRECISIONS), "evaluation", *(f"cifar10-{m}" for m in METHODS))
LINES = 25  # stored lines of a part's output
GRACE = 60  # seconds for a fit to save and stop after its time limit


def command(part: str, options: argparse.Namespace) -> list[str]:
    """The command line of a part after ``python -m``."""
    kind, _, detail = part.partition("-")
    tiny, to_json = options.tiny, ["--json", str(options.folder / f"{part}.json")]
    if kind == "tests":
        return ["pytest", "-q", "-m", "gpu", str(ROOT / "tests" / ("strategies" if tiny else ""))]
    if kind == "speed":
        size = ["--batch", "128", "512"]
        if tiny:
            size = ["--models", "lenet", "--methods", "vogn", "--batch", "4", "--seconds", "0.1"]
        return ["benchmarks.speed.targets", "--device", options.device, "--precision", detail, *size, *to_json]
    if kind == "evaluation":
        size = ["--models", "lenet", "--batch", "4", "--samples", "2", "--rounds", "1"] if tiny else ["--batch", "512"]
        return ["benchmarks.speed.evaluation", "--device", options.device, *size, *to_json]
    return _fit(part, detail, options)


def _fit(part: str, method: str, options: argparse.Namespace) -> list[str]:
    run = options.folder / part
    checkpoints = sorted(run.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    seconds = int(options.minutes * 60) - GRACE
    limit = f"00:{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    data = "digits+mlp" if options.tiny else "cifar10+resnet18"
    return [
        *("lightning_bayes", "fit", "--config", f"{data}+{method}"),
        *(f"--trainer.max_time={limit}", f"--trainer.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}"),
        *(["--trainer.max_epochs=1"] if options.tiny else [f"--data.init_args.root={options.data}"]),
        *([f"--ckpt_path={checkpoints[-1]}"] if checkpoints else []),
    ]


def run(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part.

    Args:
        part: One of `PARTS`.
        options: Parsed options.

    Returns:
        ``status`` (``"done"``, ``"failed"``, ``"cut off"`` or ``"skipped"``), the seconds, and the end of the output.
    """
    missing = missing_for(options.device)
    if missing is None and part.startswith("cifar10") and not options.tiny and not options.data.is_dir():
        missing = f"--data {options.data} is not a folder. It must contain cifar-10-batches-py."
    if missing:
        return {"status": "skipped", "reason": missing}
    words, start = [sys.executable, "-m", *command(part, options)], time.perf_counter()
    log, place = options.folder / f"{part}.log", options.folder / part if part.startswith("cifar10") else ROOT
    place.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                words,
                cwd=place,
                env={**os.environ, "PYTHONPATH": paths},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=options.minutes * 60,
                check=False,
            ).returncode
            status = "done" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "cut off"
    tail = log.read_text("utf-8", errors="replace").splitlines()[-LINES:]
    return {"status": status, "seconds": round(time.perf_counter() - start, 1), "command": words[1:], "tail": tail}


def main(arguments: list[str] | None = None) -> None:
    """Run the unfinished parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with cifar-10-batches-py")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit per part")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="test the command itself")
    parser.add_argument("--again", action="store_true", help="also run finished parts; fits continue")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    options.data = options.data.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "parts.json"
    parts: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for part in options.parts:
        if options.again or parts.get(part, {}).get("status") != "done":
            parts[part] = {**run(part, options), **provenance()}
            path.write_text(json.dumps(parts, indent=1) + "\n", "utf-8")
        row = parts[part]
        print(f"{part:18} {row['status']:8} {row.get('reason') or str(row['seconds']) + ' s'}", flush=True)
        print("".join(f"{'':4}{line}\n" for line in row.get("tail", [])), end="", flush=True)


if __name__ == "__main__":
    main()
