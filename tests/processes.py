"""Groups of processes like those of torchrun, forked from a server that has only imported the packages."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

IMPORTED = ["lightning.pytorch", "lightning_bayes"]  # imported before forking, which makes processes cheap


def start(function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """Call ``function(rank, *arguments)`` in new processes.

    Args:
        function: A top-level function of an importable module.
        ranks: Number of processes.
        folder: Folder of the logs, ``rank0.log`` and so on, and of the results.
        *arguments: Further arguments, which are pickled.

    Returns:
        The processes by rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        _result(folder, rank).unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    common = (function, ranks, _free_port(), folder, arguments)
    processes = [context.Process(target=_on_rank, args=(rank, *common)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[Any], seconds: float = 120.0) -> list[int]:
    """Wait up to `seconds` for all processes, kill the others, and return the exit codes, -9 for killed processes."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def results(ranks: int, folder: Path) -> list[Any]:
    """Read the results of all processes by rank, with ``torch.load(..., weights_only=True)``."""
    return [torch.load(_result(folder, rank), weights_only=True) for rank in range(ranks)]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _on_rank(
    rank: int, function: Callable[..., Any], ranks: int, port: int, folder: Path, arguments: tuple[Any, ...]
) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if ranks > 1:  # as torchrun does; otherwise Lightning would start the other processes
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    code = 0
    try:
        _leave(function(rank, *arguments), rank, ranks, folder)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the interpreter's shutdown, in which threads of gloo sometimes abort


def _leave(result: Any, rank: int, ranks: int, folder: Path) -> None:
    """Save the result, and wait for the results of all ranks: an early exit would break their connections."""
    partial = folder / f"rank{rank}.partial"
    torch.save(result, partial)
    partial.rename(_result(folder, rank))
    while not all(_result(folder, other).exists() for other in range(ranks)):
        time.sleep(0.01)
