"""The progress of long work, shown by every command in the same way: a bar on stderr, drawn by tqdm."""

import sys

try:  # a GPU machine may have torch alone, and goes without the bar
    from tqdm import tqdm
except ImportError:
    tqdm = None

FORMAT = "{percentage:3.0f}%|{bar:20}| {elapsed}, {remaining} left  {desc}"
LOG_SECONDS = 20  # between two lines where stderr is no terminal


class Progress:
    """A bar while it is called, which leaves nothing behind. Where stderr is a file, it is a line every 20 seconds."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet or tqdm is None
        self.bar: tqdm | None = None

    def __call__(self, share: float, text: str = "") -> None:
        """Show which share of the work is done, and a few words about it. The first call starts the clock."""
        if self.quiet:
            return
        live = sys.stderr.isatty()
        if self.bar is None:
            when = {"mininterval": 0.1} if live else {"mininterval": LOG_SECONDS, "delay": LOG_SECONDS}
            file = sys.stderr if live else _Log()
            # on the first line, whatever bar an interrupted command left open
            shape = {"bar_format": FORMAT, "dynamic_ncols": live, "leave": False, "position": 0}
            self.bar = tqdm(desc=text, total=1.0, initial=share, miniters=0, file=file, **shape, **when)
        self.bar.set_description_str(text, refresh=False)
        if live:
            self.bar.n = share
            self.bar.refresh()
        else:
            self.bar.update(share - self.bar.n)

    def of(self, done: int, total: int, text: str = "") -> None:
        """The same for work that is counted. It ends with the last piece."""
        if done < total:
            self(done / total, text)
        else:
            self.close()

    def close(self) -> None:
        """Take the bar away. A later call begins a new one."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def say(text: str) -> None:
    """Print a line on stderr, above a bar that may stand there."""
    if tqdm is None:
        print(text, file=sys.stderr, flush=True)
    else:
        tqdm.write(text, file=sys.stderr)


class _Log:
    """Stands for stderr where that is a file: each state of a bar becomes a line, without control characters."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(f"{text.strip()}\n")

    def flush(self) -> None:
        sys.stderr.flush()
