"""A job that saves step after step on nodes of its own, while a test takes parts away from it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.machine import seconds

_WORKER = Path(__file__).with_name("saves_worker.py")
_TESTS = Path(__file__).parents[1]


class Job:
    """Two ranks that resume and save; each writes what it did to a file of the local disk.

    Args:
        mounts: of the nodes; rank N is on node N.
        root: of the manager, below mounts[0].
        notes: a local directory for what the ranks say.
        steps: how many more they save. None: until they are told to stop.
        fresh: whether nothing is there yet, and the job begins anew.
        timeout_s: after which a save gives up, on an idle machine.
    """

    def __init__(
        self,
        mounts: list[Path],
        root: Path,
        notes: Path,
        *,
        steps: int | None = None,
        fresh: bool = False,
        timeout_s: float = 15,
    ) -> None:
        import torch.distributed as dist

        notes.mkdir()
        self._notes = notes
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._output = (notes / "output").open("w+")
        shared = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{_TESTS}:{os.environ.get('PYTHONPATH', '')}",
            "DFS_MOUNTS": ":".join(map(str, mounts)), "DFS_TIMEOUT_S": str(seconds(timeout_s)),
        }  # fmt: skip
        if fresh:
            shared["DFS_FRESH"] = "1"
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(_WORKER), str(root), str(notes), str(steps or 1 << 30)],
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **shared, "RANK": str(rank)},
            )
            for rank in range(2)
        ]

    def notes(self, rank: int) -> list[dict[str, Any]]:
        """Returns what a rank has noted: "resumed", "begins", "saved", "failed" or "ended"."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self._notes / f"rank{rank}").read_text().split("\n")[:-1]
            return [json.loads(line) for line in lines]
        return []

    def steps(self, what: str, rank: int = 0) -> list[int]:
        return [note["step"] for note in self.notes(rank) if note["what"] == what]

    def save_s(self) -> float:
        """Returns how long the last save took that has returned on rank 0."""
        notes = self.notes(0)
        last = max(number for number, note in enumerate(notes) if note["what"] == "saved")
        return float(notes[last]["at_s"] - notes[last - 1]["at_s"])

    def wait_saved(self, more: int, deadline_s: float = 120) -> int:
        """Waits until that many more saves have returned on rank 0; returns the last one's step."""
        before = len(self.steps("saved"))

        def is_so() -> bool:
            assert not self.failures(), self.failures()
            assert self.ranks[0].poll() is None, self.output()
            return len(self.steps("saved")) >= before + more

        self._wait(f"{more} saves", is_so, deadline_s)
        return self.steps("saved")[-1]

    def wait_begun(self) -> None:
        """Waits until rank 0 begins another save."""
        before = len(self.steps("begins"))
        self._wait("the next save", lambda: len(self.steps("begins")) > before, 120)

    def wait_told(self, ranks: tuple[int, ...], deadline_s: float) -> list[str]:
        """Waits until these ranks have failed or ended; returns what they were told."""

        def is_so() -> bool:
            return all(self._is_over(rank) for rank in ranks)

        self._wait(f"an error on ranks {ranks}", is_so, deadline_s)
        return [self._last(rank) for rank in ranks]

    def wait_saved_or_told(self, more: int, deadline_s: float) -> list[str]:
        """Waits until that many more saves have returned, or both ranks failed: what they said."""
        before = len(self.steps("saved"))

        def is_so() -> bool:
            return len(self.steps("saved")) >= before + more or all(map(self._is_over, (0, 1)))

        self._wait(f"{more} saves, or an error on both ranks", is_so, deadline_s)
        return [told for rank in (0, 1) if (told := self._last(rank))]

    def failures(self) -> list[str]:
        return [str(n["error"]) for r in (0, 1) for n in self.notes(r) if n["what"] == "failed"]

    def finish(self, deadline_s: float = 120) -> None:
        """Has the ranks stop after the save that runs; fails if they do not end well."""
        (self._notes / "stop").touch()
        told = self.wait_told((0, 1), deadline_s)
        assert told == ["ended", "ended"], f"{told}\n{self.output()}"

    def is_gone(self, deadline_s: float = 60) -> bool:
        """Waits until both processes have ended: the kernel ends none within a request."""
        give_up_at = time.monotonic() + seconds(deadline_s)
        while None in [rank.poll() for rank in self.ranks] and time.monotonic() < give_up_at:
            time.sleep(0.1)
        return None not in [rank.poll() for rank in self.ranks]

    def output(self) -> str:
        return (self._notes / "output").read_text(errors="replace")[-6000:]

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait(seconds(60))
        self._output.close()

    def _is_over(self, rank: int) -> bool:
        return self._last(rank) != "" or self.ranks[rank].poll() is not None

    def _last(self, rank: int) -> str:
        noted = [note for note in self.notes(rank) if note["what"] in ("failed", "ended")]
        return str(noted[-1].get("error", "ended")) if noted else ""

    def _wait(self, what: str, is_so: Any, deadline_s: float) -> None:
        give_up_at = time.monotonic() + seconds(deadline_s)
        while not is_so():
            assert time.monotonic() < give_up_at, (
                f"{what}: not within {seconds(deadline_s):.0f} s; rank 0 noted "
                f"{self.notes(0)[-3:]}, rank 1 {self.notes(1)[-3:]}\n{self.output()}"
            )
            time.sleep(0.02)
