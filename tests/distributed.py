"""Running one function on several gloo processes of this machine."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IMPORTED = [
    "lightning.pytorch",
    "lightning_bayes",
]  # once, by the server that all ranks are forked from: seconds for each


def run_on_ranks(
    function: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any, timeout: float = 180
) -> list:
    """Call ``function(rank, *args)`` in `world_size` new processes that form a gloo group.

    Args:
        function: A function at the top of its file. The file is loaded in each process by its path, because test modules
            cannot be imported by name.
        world_size: Number of processes.
        tmp_path: Where the processes meet and leave their results; a file, so that no port can be taken.
        *args: Further arguments, to be pickled.
        timeout: Seconds after which all are killed.

    Returns:
        The results by rank: whatever ``torch.load(..., weights_only=True)`` reads.

    Raises:
        TimeoutError: If they do not end.
        ProcessRaisedException: With the traceback of the rank that raised first.
    """
    place = tmp_path / uuid.uuid4().hex
    place.mkdir()
    what = (inspect.getsourcefile(function), function.__name__)
    multiprocessing.set_forkserver_preload(IMPORTED)
    processes = mp.start_processes(
        _on_rank, (world_size, str(place), what, args), nprocs=world_size, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + timeout
    while not processes.join(timeout=1):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            raise TimeoutError(f"{function.__name__} on {world_size} ranks did not end within {timeout:g} seconds.")
    return [torch.load(place / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


def _on_rank(rank: int, world_size: int, place: str, what: tuple[str, str], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # For Lightning: the processes exist already. It takes the process group that it finds.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{place}/group", rank=rank, world_size=world_size)
    spec = importlib.util.spec_from_file_location("on_ranks", what[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = getattr(module, what[1])(rank, *args)
    _leave(result, rank, [Path(place) / f"{other}.pt" for other in range(world_size)])


def _leave(result: Any, rank: int, files: list[Path]) -> None:
    """Save the result and end this process once all ranks have saved theirs.

    Without the interpreter's own ending: gloo's threads abort it now and then ("terminate called without an active
    exception"), and a rank that leaves early breaks the others' connections.
    """
    partial = files[rank].with_suffix(".partial")
    torch.save(result, partial)
    partial.rename(files[rank])
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
