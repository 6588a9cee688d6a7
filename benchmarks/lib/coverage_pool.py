"""Walk many models in several processes; one that dies or hangs costs its model, not the walk."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["walk"]

PATIENCE_S = 300
_SCRIPT = Path(__file__).resolve().parent.parent / "coverage.py"


class _Worker:
    def __init__(self, command: Sequence[str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TINY_NO_EXTRAS": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def ask(self, name: str) -> dict[str, Any] | None:
        """Return the answer; None where the process died or took too long, and is gone."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(f"{name}\n".encode())
            stdin.flush()
            ready, _, _ = select.select([stdout], [], [], PATIENCE_S)
            if ready and (line := stdout.readline()):
                return json.loads(line)
        except BrokenPipeError:
            pass
        self.close(kill=True)
        return None

    def close(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def walk(
    names: Sequence[str],
    zoo: Path,
    jobs: int,
    progress: Callable[[int], None] = lambda _: None,
    *,
    script: Path = _SCRIPT,
) -> Iterator[dict[str, Any]]:
    """Measure models, in whatever order they come to an end.

    Args:
        names: model types and variants of the zoo.
        zoo: its folder.
        jobs: processes at a time.
        progress: called with the count of models that are done.
        script: what answers names with figures when it is given ``--serve``.

    Yields:
        What the script measures of each: that of ``coverage_model.Walk.measure``.
    """
    command = [sys.executable, str(script), "--serve", "--zoo", str(zoo)]
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def work() -> None:
        worker = None
        while not waiting.empty():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or _Worker(command)
            answer = worker.ask(name)
            if answer is None:
                worker = None
                answer = {"type": name, "crash": f"the process died, or was silent for {PATIENCE_S} s"}
            done.put(answer)
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(names)))]
    for thread in threads:
        thread.start()
    for count in range(1, len(names) + 1):
        yield done.get()
        progress(count)
    for thread in threads:
        thread.join()
