"""Long work in stages, each one a command: one progress bar over all of them, and going on after any interruption."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support.errors import UsageError, UserError
from support.files import read_json, runs, write_json
from support.machine import default_threads
from support.progress import Progress

SAVE_SECONDS = 5  # between two records of the time that was spent


class StageFailed(UserError):
    """A command that failed. The message is its own."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Stages:
    """Work in a folder, which keeps how far it came. `hours` is what all of it takes, for the progress bar."""

    def __init__(self, folder: Path, hours: float, identity: dict[str, Any]):
        """identity: by name, what makes this work what it is. Raises UsageError if the folder holds other work, or if
        another process works there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.total = folder, 3600 * hours
        self.lock = open(folder / "lock", "a+")  # held as long as this process lives
        self._alone()
        self._note()
        self.path = folder / "state.json"
        fresh = {"identity": identity, "seconds": 0.0, "spent": {}, "done": [], "kept": {}}
        self.state = read_json(self.path) if self.path.exists() else fresh
        for name, value in self.state["identity"].items():
            if identity.get(name) != value:
                now = f"{name} {value!r:.80}, here {identity.get(name)!r:.80}"
                raise UsageError(f"{folder} holds work with other options ({now}). Use these, or another --work.")
        self.progress = Progress()

    def _alone(self) -> None:
        """Take the lock of the folder. Commands that outlived an earlier process hold it: they are ended."""
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.lock.seek(0)
        first, *commands = map(int, self.lock.read().split() or ["0"])
        if first == 0 or runs(first):  # 0: it has just begun
            raise UsageError(f"process {first} works in {self.folder} already. Wait for it, or give another --work.")
        for process in commands:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def _note(self, workers: Sequence[subprocess.Popen] = ()) -> None:
        """Write into the lock which processes hold it."""
        self.lock.truncate(0)
        self.lock.write(" ".join(map(str, (os.getpid(), *(worker.pid for worker in workers)))))
        self.lock.flush()

    @property
    def seconds(self) -> float:
        """That the work has taken so far, with what was interrupted."""
        return self.state["seconds"]

    def spent(self, name: str) -> float:
        """Seconds that a stage has taken so far."""
        return self.state["spent"].get(name, 0.0)

    def kept(self, name: str, decide: Callable[[], Any]) -> Any:
        """What was decided under this name, now or before an interruption. Anything that JSON holds."""
        if name not in self.state["kept"]:
            self.state["kept"][name] = decide()
            self._save()
        return self.state["kept"][name]

    def run(
        self, name: str, title: str, command: Sequence[object], processes: int = 1, fine: Sequence[int] = (0,)
    ) -> None:  # fmt: skip
        """Run `python -m COMMAND`, unless it was finished before an interruption. Several processes are as in torchrun.

        Its last line on stderr is shown behind `title`. All of its output goes to log.txt in the folder.

        Raises:
            StageFailed: its exit code is not among `fine`.
        """
        if name in self.state["done"]:
            return
        with open(self.folder / "log.txt", "ab") as log, self._started(command, processes, log) as workers:
            said: deque[str] = deque(maxlen=20)
            reader = threading.Thread(target=_read, args=(workers[0].stderr, log, said))
            reader.start()
            begun, due = time.monotonic(), 0.0  # when the next record is written
            seconds, earlier = self.seconds, self.spent(name)
            codes, wrong = [None], []
            while None in codes and not wrong:
                time.sleep(0.1)
                codes = [worker.poll() for worker in workers]
                wrong = [code for code in codes if code not in (None, *fine)]
                now = time.monotonic() - begun
                self.state["seconds"] = seconds + now
                self.state["spent"][name] = earlier + now
                if now > due:
                    due = now + SAVE_SECONDS
                    self._save()
                last = said[-1].rpartition(" left  ")[2] if said else ""
                self.progress(min(0.999, self.seconds / self.total), f"{title}  {last}")
        reader.join()
        if wrong:
            self.progress.close()
            raise StageFailed(_reason(title, said, wrong[0]), max(wrong[0], 1))
        self.state["done"].append(name)
        self._save()

    @contextlib.contextmanager
    def _started(self, command: Sequence[object], processes: int, log: Any) -> Iterator[list[subprocess.Popen]]:
        """The processes of a command. They are killed if they still run at the end."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        workers: list[subprocess.Popen] = []
        try:
            for rank in range(processes):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
                place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                place |= {"OMP_NUM_THREADS": max(1, default_threads() // processes)} if processes > 1 else {}
                worker = subprocess.Popen(
                    [sys.executable, "-m", *map(str, command)], env=os.environ | {k: str(v) for k, v in place.items()},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log if rank else subprocess.PIPE,
                    pass_fds=[self.lock.fileno()], start_new_session=True,
                )  # fmt: skip
                workers.append(worker)
                self._note(workers)
            yield workers
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()

    def _save(self) -> None:
        write_json(self.path, self.state)


def _read(stream: Any, log: Any, said: deque[str]) -> None:
    """Copy what a command says to the log, and keep its last lines."""
    for line in stream:
        log.write(line)
        log.flush()
        if text := line.decode(errors="replace").strip():
            said.append(text)


def _reason(title: str, said: Sequence[str], code: int) -> str:
    """Why a command failed: the line that it reported, or else how it ended."""
    errors = [text.removeprefix("error  ") for text in said if text.startswith("error  ")]
    killed = f"it was ended by signal {-code}" + " (was there enough memory?)" * (code == -signal.SIGKILL)
    return f"{title}: {errors[-1] if errors else killed if code < 0 else said[-1] if said else f'exit code {code}'}"
