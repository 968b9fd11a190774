"""Real ranks for tests: ``run_ranks(function, world, *args)`` runs ``function(rank, world, *args)`` in processes.

    parent   -- (rank, world, store, function, args) -->   worker     joins a fresh gloo group, calls the function
    parent   <-------------- result or traceback -------   worker     keeps the group open
    parent   ---------------------- done ------------->    worker     leaves the group, waits for the next job

Workers stay alive between jobs, because starting one costs an import of torch; a job gets a default process group of
its own, over exactly its ranks, and may make subgroups and DeviceMeshes of it. ``function`` must be at the top level
of a module, and arguments and results must pickle.

Nothing can hang. A worker that has not finished in time prints its stack and exits; a job with a failed, dead or late
rank ends every worker, and the next job starts new ones. A group is left only when all ranks have reported, so the
first failure to arrive is the cause and not an echo of it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import interpreter
import poison
import torch
import torch.distributed as dist

# The server imports once what most jobs need, and forks, so that a new worker costs nothing. It never runs a tensor
# operation, so there are no threads to lose in the fork. What is not installed is left out.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "logitless",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch._inductor.compile_fx",
        "triton",
        "transformers.models.qwen3.modeling_qwen3",
        "megatron.core",
    ]
)


class RankFailed(AssertionError):
    """A rank raised, died or was late; the text holds its traceback."""


@dataclass
class _Worker:
    process: Any
    pipe: Any


_workers: list[_Worker] = []


def run_ranks(function: Callable, world: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """The results of ``function(rank, world, *args)`` of every rank, in rank order.

    Raises:
        RankFailed: with the traceback of the first rank that failed, or the names of the ranks that were late.
    """
    __tracebackhide__ = True
    while len(_workers) < world:
        _workers.append(_start())
    team = _workers[:world]
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        try:
            for rank, worker in enumerate(team):
                worker.pipe.send_bytes(pickle.dumps((rank, world, store, timeout, pickle.dumps((function, args)))))
            results = _collect(team, timeout)
            for worker in team:
                worker.pipe.send_bytes(b"done")
            # The store must outlive every rank's goodbye.
            _collect(team, timeout)
        except BaseException:
            close_ranks()
            raise
    return [results[rank] for rank in range(world)]


def close_ranks() -> None:
    """End all workers, whatever they are doing."""
    while _workers:
        worker = _workers.pop()
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def new_process(function: Callable, args: tuple) -> Any:
    """A process of its own that calls the function and ends with it; what most jobs need is imported."""
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def _start() -> _Worker:
    ours, theirs = _context.Pipe()
    process = new_process(_serve, (theirs,))
    theirs.close()
    return _Worker(process, ours)


def _collect(team: list[_Worker], timeout: float) -> dict[int, Any]:
    __tracebackhide__ = True
    # A late worker ends itself at the timeout, stack printed; the margin lets it.
    deadline = time.monotonic() + timeout + 3.0
    waiting = {worker.pipe: rank for rank, worker in enumerate(team)}
    results: dict[int, Any] = {}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} of {len(team)} did not finish in {timeout} s.")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                message = pipe.recv_bytes()
            except EOFError:
                raise RankFailed(_obituary(team, rank)) from None
            with warnings.catch_warnings():
                # Modules that a result needs may be imported here, and what they warn of is their own business.
                warnings.simplefilter("ignore")
                succeeded, value = pickle.loads(message)
            if not succeeded:
                # A peer that died makes the others fail, and their report may well arrive before its end is seen.
                dead = [r for r, worker in enumerate(team) if r != rank and not _outlives(worker, 0.3)]
                text = _obituary(team, dead[0]) if dead else f"rank {rank} of {len(team)} failed:\n{value}"
                raise RankFailed(text)
            results[rank] = value
    return results


def _outlives(worker: _Worker, seconds: float) -> bool:
    worker.process.join(seconds)
    return worker.process.exitcode is None


def _obituary(team: list[_Worker], rank: int) -> str:
    team[rank].process.join(1.0)
    code = team[rank].process.exitcode
    return f"rank {rank} of {len(team)} died with exit code {code}; its stack is on stderr if it was late."


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    poison.install()
    if "TRITON_INTERPRET" in os.environ:
        interpreter.quicken()
    while True:
        try:
            rank, world, store, timeout, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # Also ends a worker whose parent is gone.
        faulthandler.dump_traceback_later(timeout, exit=True, file=sys.__stderr__)
        try:
            reply = True, _run(rank, world, store, timeout, job)
            # Pickled here, so that a result that cannot be is reported like any other failure.
            message = pickle.dumps(reply)
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        try:
            pipe.send_bytes(message)
            pipe.recv_bytes()
            dist.destroy_process_group()
            pipe.send_bytes(pickle.dumps((True, None)))
        except (EOFError, BrokenPipeError):
            return
        faulthandler.cancel_dump_traceback_later()


def _run(rank: int, world: int, store: str, timeout: float, job: bytes) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    function, args = pickle.loads(job)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Conversion of an array with ndim", DeprecationWarning)
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return function(rank, world, *args)
