"""Worker processes on this machine that run test functions together, as the ranks of one process group."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
COLLECTIVE_SECONDS = 20
"""After so long a rank that waits for the others raises."""
START_SECONDS = 180
"""So long the ranks may take to import torch and find each other, on a busy machine."""


class WorldError(AssertionError):
    """What went wrong on each rank."""


class World:
    """Ranks that live for several tests, as starting them takes longer than most of the tests.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, seconds: float = START_SECONDS, grace: float = 5
    ) -> list[Any]:
        """Calls ``function(rank, *args)`` on every rank and returns what they returned.

        Raises:
            WorldError: with the traceback of every rank that raised, died, or did not answer in time. The
                ranks are started anew for the next call.
        """
        outcomes = self.outcomes(function, *args, seconds=seconds, grace=grace)
        if any(error for _, error in outcomes):
            told = (f"rank {rank}: {error or 'fine'}" for rank, (_, error) in enumerate(outcomes))
            raise WorldError("\n".join(told))
        return [result for result, _ in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, seconds: float = START_SECONDS, grace: float = 5
    ) -> list[tuple[Any, str | None]]:
        """As :meth:`run`, but returns (result, error) of every rank; error is None where all went well.

        Once a rank has failed, the others may go on for ``grace`` seconds.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        outcomes = self._collect(time.monotonic() + seconds, grace)
        if any(error for _, error in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """Ends the ranks, whatever they are doing."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1 if process.is_alive() else 0)
            if process.is_alive():
                process.kill()
            process.join()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
        threads, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"
        try:
            for rank in range(self.size):
                here, there = context.Pipe()
                given = (rank, self.size, self._store.port, there)
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
        finally:
            del os.environ["OMP_NUM_THREADS"]
            if threads is not None:
                os.environ["OMP_NUM_THREADS"] = threads

    def _collect(self, deadline: float, grace: float) -> list[tuple[Any, str | None]]:
        answers: dict[int, tuple[Any, str | None]] = {}
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for pipe in wait(list(waiting), left):
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._processes[rank].join(1)
                    answers[rank] = None, f"died with exit code {self._processes[rank].exitcode}"
                if answers[rank][1]:
                    deadline = min(deadline, time.monotonic() + grace)
        return [answers.get(rank, (None, "did not answer in time")) for rank in range(self.size)]


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(HOST, port, None, False)
    # On a busy machine one rank may need much longer than the other to import torch.
    store.set(f"rank {rank}", "here")
    store.wait([f"rank {each}" for each in range(size)], datetime.timedelta(seconds=START_SECONDS))
    limit = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    # os._exit(), as a rank that ends must not wait for the others while it tidies up.
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = function(rank, *args), None
        except Exception:
            answer = None, traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:
            os._exit(1)
