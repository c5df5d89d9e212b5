"""The prompts that an engine has run and may need again: copies of its caches, in memory and then on disk.

The caches of an engine hold one text for each row. Where two conversations alternate, each would throw out the other
one. So before a request overwrites a text that is long enough, its rows are copied to the host, and a request that goes
on from a copied text gets them back. The copies are exact, so the tokens stay the same.
"""

import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from decoding.drafter import Drafter
from decoding.snapshots import Snapshot, memory_of, remembered
from decoding.step import DecodeState
from support import cache
from support.files import clean_up
from weights.files import safetensors_parts

WORTHWHILE = 32  # tokens; fewer are run again sooner than they are copied
MB = 1 << 20
ENDING = ".rows"  # of the files
FORM = 2  # of what they say; another number is never read


def kept_ids(ids: list[int], adapter: int) -> list[int]:
    """The ids of a text as the caches name it. With an adapter the first one is no token's, so that it has no beginning
    in common with texts of other adapters, whose keys and values are others."""
    return [ids[0] + (adapter << 40), *ids[1:]] if adapter else ids


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of ids with which both texts begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(eq=False)
class Text:
    """What the caches hold of a text."""

    ids: list[int] = field(default_factory=list)
    drafted: int = 0  # rows that were made for the draft caches, see `Drafter.resume`
    used: int = 0  # when a row came to hold it; a larger number is later
    at: int = 0  # tokens that the memory of recurrent layers has, which cannot be taken back
    snapshots: Sequence[Snapshot] = ()  # in their order

    def way_on(self, prompt: list[int], drafter: Drafter) -> tuple[int, Snapshot | None]:
        """How many tokens of a prompt need not be run if a row holds this text, and the snapshot that this takes."""
        P = len(prompt)
        common = min(common_length(self.ids, prompt), P - 1)
        common = max(0, common - (drafter.D > 0))  # draft row i holds token i + 1, which must agree too
        best, taken = 0, None
        here = Snapshot(self.at, common, self.drafted)  # what the row itself has
        for snapshot in (here, *self.snapshots):
            start = drafter.resume(P, snapshot.drafted if drafter.ring else self.drafted, snapshot.end)
            if snapshot.at <= start and snapshot.end <= common and start > best:
                best, taken = start, snapshot
        return best, None if taken is here else taken

    def usable(self, prompt: list[int], drafter: Drafter) -> int:
        """How many tokens of a prompt need not be run if a row holds this text."""
        return self.way_on(prompt, drafter)[0]


@dataclass(eq=False)
class Saved(Text):
    """A text whose tensors are on the host, or else in a file."""

    nbytes: int = 0
    rows: list[Tensor] = field(default_factory=list)
    file: Path | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What a file says beside the tensors."""
        snapshots = [list(snapshot[:3]) for snapshot in self.snapshots]
        return {"ids": self.ids, "drafted": self.drafted, "at": self.at, "snapshots": snapshots}


def cache_rows(state: DecodeState, drafter: Drafter, row: int, length: int, drafted: int) -> Iterator[Tensor]:
    """The live part of every cache of a row, [..., tokens, width]: the target's first, then the drafter's."""
    yield from (kv.narrow(-2, state.spans[row][0], length) for kv in state.kv)
    for drafts in drafter.caches:
        yield drafts.narrow(-4, row, 1).narrow(-2, 0, drafter.rows_held(drafted))


def kept_rows(state: DecodeState, drafter: Drafter, row: int, length: int, drafted: int) -> list[Tensor]:
    """`cache_rows`, and what recurrent layers remember of the row's last token."""
    return [*cache_rows(state, drafter, row, length, drafted), *memory_of(state, row)]


class PromptCache:
    """Texts that were run, the least recently used ones on disk. `Engine.prompt_cache` holds one.

    All calls of `exchange` come from the request that has the engine, so they never run at the same time.
    """

    def __init__(self, memory_mb: int = 0, disk_mb: int = 0, folder: Path | None = None, keep: bool = False):
        """Prepare the cache. Without a folder or with disk_mb = 0 nothing is written to disk.

        Args:
            memory_mb, disk_mb: how much the copies may take in memory and on disk.
            folder: holds the files. It must belong to this model, this head and these number formats alone.
            keep: leave the files when the cache is closed, and use those that are there. Other processes may use the
                folder at the same time: a file that one of them took away is a text that is run again.
        """
        self.limit = memory_mb * MB
        self.disk_limit = disk_mb * MB if folder is not None else 0
        self.folder = folder
        self.keep = keep
        self.entries: list[Saved] = []  # the most recently used one comes last
        self.hits = 0
        if self.disk_limit and folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for part in folder.glob(f"*{ENDING}.*"):  # of a process that was killed while it wrote
                clean_up(folder / f"{part.name.partition(ENDING)[0]}{ENDING}")
            files = sorted(folder.glob(f"*{ENDING}")) if keep else ()
            self.entries = [saved for file in files if (saved := _described(file))]

    @property
    def held_bytes(self) -> int:
        """What the copies take in memory."""
        return sum(saved.nbytes for saved in self.entries if saved.file is None)

    @property
    def disk_bytes(self) -> int:
        """What the copies take on disk."""
        return sum(saved.nbytes for saved in self.entries if saved.file is not None)

    def exchange(self, state: DecodeState, drafter: Drafter, row: int, text: Text, prompt: list[int]) -> Saved | None:
        """Prepare the caches of a row, which hold `text`, for a prompt. Returns the copied text that the row got, which
        `text` is afterwards, or None."""
        self.save(state, drafter, row, text, prompt)
        best = max(self.entries, key=lambda saved: saved.usable(prompt, drafter), default=None)
        worth = best is not None and best.usable(prompt, drafter) - text.usable(prompt, drafter) >= WORTHWHILE
        if not worth or not self._fetch(best):
            return None
        length = min(len(best.ids), state.spans[row][1])
        drafted = drafter.rows_of_part(best.drafted, length)
        places = kept_rows(state, drafter, row, length, drafted)
        parts = [part[..., : place.shape[-2], :] for place, part in zip(places, best.rows, strict=False)]
        alike = [place.shape for place in places] == [part.shape for part in parts]
        shapes = [part.shape for part in remembered(state, drafter, row)]
        alike = alike and all([part.shape for part in s.tensors] == shapes for s in best.snapshots)
        if not alike or len(parts) < len(best.rows):  # a file of another engine
            self._drop(best)
            return None
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
        self.hits += 1
        text.ids, text.drafted, text.at, text.snapshots = best.ids[:length], drafted, best.at, best.snapshots
        return best

    def save(self, state: DecodeState, drafter: Drafter, row: int, text: Text, prompt: list[int]) -> None:
        """Copy a row, which holds `text`, if that is worth it: the row is about to hold this prompt instead.

        A text with which a copied one begins is not copied. The texts with which it begins are no longer needed.
        """
        ids, drafted = text.ids, text.drafted
        worth = max(WORTHWHILE, len(ids) // 64)  # copies of a long text take long, and room
        if not (self.limit or self.disk_limit) or len(ids) - common_length(ids, prompt) < worth:
            return
        for saved in self.entries:
            if saved.drafted >= drafted and saved.ids[: len(ids)] == ids:
                return
        for saved in list(self.entries):
            if saved.drafted <= drafted and ids[: len(saved.ids)] == saved.ids:
                self._drop(saved)
        rows = kept_rows(state, drafter, row, len(ids), drafted)
        nbytes = sum(held.nbytes for held in (*rows, *text.snapshots))
        if nbytes > max(self.limit, self.disk_limit):
            return
        copies = [part.to("cpu", copy=True).contiguous() for part in rows]
        self.shrink()
        self.entries.append(Saved(list(ids), drafted, 0, text.at, text.snapshots, nbytes, copies))

    def distrust(self, saved: Saved | None) -> None:
        """Drop a text that a request got back, if any, because the request failed: what it went on from may be wrong."""
        if saved in self.entries:
            self._drop(saved)

    def close(self) -> None:
        """Forget everything in memory. Files stay only if the cache was made with `keep`, with all that fits."""
        if self.keep and self.disk_limit:
            for saved in [saved for saved in self.entries if saved.file is None]:
                self._write(saved)
        elif self.disk_limit and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.entries = []

    def _fetch(self, saved: Saved) -> bool:
        """Bring a text into memory and count it as the last used one. False if its file is damaged or gone."""
        if saved.file is not None:
            from safetensors.torch import load

            kept = cache.fetch(saved.file)
            if kept is None or kept.about != saved.about:
                self._drop(saved)
                return False
            tensors = load(kept.payload)
            count = 1 + len(saved.snapshots)
            saved.rows, *copies = ([tensors[n] for n in sorted(tensors) if n.startswith(f"{i}.")] for i in range(count))
            saved.snapshots = [s._replace(tensors=(*p,)) for s, p in zip(saved.snapshots, copies, strict=True)]
            saved.file.unlink(missing_ok=True)
            saved.file = None
        self.entries.remove(saved)
        self.entries.append(saved)
        return True

    def shrink(self) -> None:
        """Keep both limits: texts that were used least recently go to disk, and from there they are deleted.

        Writing takes a second for a long text, so it waits for the end of a request. Until then, memory may hold one text
        more than is allowed.
        """
        while self.held_bytes > self.limit:
            self._write(next(saved for saved in self.entries if saved.file is None))

    def _write(self, saved: Saved) -> None:
        """Move a text from memory to disk. It is dropped if it cannot be written, or is larger than what is allowed."""
        if saved.nbytes > self.disk_limit or self.folder is None:
            self._drop(saved)
            return
        while self.disk_bytes + saved.nbytes > self.disk_limit:
            self._drop(next(other for other in self.entries if other.file is not None))
        # in the order of writing, and unlike the name that any other process gives at the same time
        file = self.folder / f"{time.time_ns():020}-{secrets.token_hex(8)}{ENDING}"
        parts = saved.rows, *(snapshot.tensors for snapshot in saved.snapshots)
        tensors = {f"{i}.{j:04}": part for i, held in enumerate(parts) for j, part in enumerate(held)}
        try:
            cache.store(file, b"".join(safetensors_parts(tensors)), saved.about, 0o600)  # somebody's own words
        except OSError:
            self._drop(saved)
            return
        saved.file, saved.rows = file, []
        saved.snapshots = [snapshot._replace(tensors=()) for snapshot in saved.snapshots]

    def _drop(self, saved: Saved) -> None:
        self.entries.remove(saved)
        if saved.file is not None:
            saved.file.unlink(missing_ok=True)


def _described(file: Path) -> Saved | None:
    """What a file holds, without its rows. None for a file that cannot be used."""
    kept = cache.fetch(file, payload=False)
    if kept is None:
        return None
    about, size = kept.about, file.stat().st_size
    snapshots = [Snapshot(*numbers) for numbers in about["snapshots"]]
    return Saved(about["ids"], about["drafted"], 0, about["at"], snapshots, size, file=file)
