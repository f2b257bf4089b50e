"""Starts processes, and returns their results, or how they ended, within a deadline."""

import importlib
import logging
import pickle
import socket
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass
class Outcome:
    """The results, errors and logs of each scenario in one process, and the exit code of the process."""

    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)
    exitcode: int | None = None

    def __getitem__(self, scenario):
        assert scenario not in self.errors, self.errors[scenario]
        return self.results[scenario]


class _Remember(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def launch(scenarios, size, directory, deadline=240.0):
    """Run scenarios, named ``module:function``, in turn in `size` processes of one gloo group; return their results.

    A scenario is a function of rank and size.
    Processes that are alive after `deadline` seconds are killed, and counted as hanging.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # torch and ikkuna are imported once, by the server from which the processes are forked
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "ikkuna.export", "tests.distributed.loops"])
    files = [directory / f"{size}-{port}-{rank}.pickle" for rank in range(size)]
    processes = [
        context.Process(target=_process, args=(rank, size, port, list(scenarios), str(files[rank])))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + deadline
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    outcomes = []
    for file, process in zip(files, processes, strict=True):
        outcome = pickle.loads(file.read_bytes()) if file.exists() else Outcome()
        outcome.exitcode = process.exitcode
        outcomes.append(outcome)
    told = [f"rank {r}: {o.errors}" for r, o in enumerate(outcomes)]
    assert not hanging, f"ranks {hanging} were alive after {deadline} s; {told}"
    return outcomes


def _process(rank, size, port, scenarios, file):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    outcome = Outcome()
    remember = _Remember()
    logging.getLogger("ikkuna").addHandler(remember)
    for scenario in scenarios:
        module, _, function = scenario.partition(":")
        remember.lines = outcome.logs[function] = []
        try:
            torch.manual_seed(0)
            outcome.results[function] = getattr(importlib.import_module(module), function)(rank, size)
        except BaseException:
            outcome.errors[function] = traceback.format_exc()
        with open(file, "wb") as f:
            pickle.dump(outcome, f)
        if dist.is_initialized() and function not in outcome.errors:
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
