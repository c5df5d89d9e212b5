"""Download a model from the Hugging Face hub: only files that we read, at one pinned revision.

    python -m scripts.download REPO [--revision main] [--out DIR] [--allow-pickle]

Needs `pip install huggingface_hub`. Gated models need a login (`hf auth login`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from support.errors import UsageError, bad_files, command_parser, run_command

TEXTS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "LICENSE*", "USE_POLICY*")
WEIGHTS = ("model*.safetensors", "*.safetensors")  # the first pattern that matches anything counts
PICKLES = ("pytorch_model*.bin", "consolidated.*.pth", "*.bin", "*.pth")


def select(files: Iterable[str], allow_pickle: bool) -> list[str]:
    """The files of a repository to fetch: weights of one kind, configs, tokenizer. Subfolders are left out.

    Raises ValueError if there are no weights, or only pickles without `allow_pickle`.
    """
    top = [name for name in files if "/" not in name]
    chosen = {name for name in top if any(fnmatch(name, pattern) for pattern in TEXTS)}
    for pattern in WEIGHTS + PICKLES:
        if weights := {name for name in top if fnmatch(name, pattern)}:
            if pattern in PICKLES and not allow_pickle:
                found = f"weights exist as pickle only ({min(weights)})"
                raise ValueError(f"{found}. Trust the author? Use --allow-pickle.")
            return sorted(chosen | weights)
    raise ValueError("no weight files at the top level: not a model, or a format that we do not read (GGUF?).")


def download(repo: str, revision: str, out: Path | None, allow_pickle: bool) -> tuple[Path, str]:
    """Fetch `repo` into `out` (default: ./NAME). Returns (directory, commit). Raises ValueError in one line."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise UsageError(f"{repo}: expected OWNER/NAME, as in the address of the model's page.")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError("scripts.download needs huggingface_hub: pip install huggingface_hub") from error
    out = out or Path(repo.split("/")[1])
    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision)
        files = select([file.rfilename for file in info.siblings or ()], allow_pickle)
        huggingface_hub.snapshot_download(repo, revision=info.sha, allow_patterns=files, local_dir=out)
    except Exception as error:  # the hub's client raises errors of its own, of httpx and of the system
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{repo} at {revision}: {first}") from error
    return out, info.sha


def run(args: argparse.Namespace) -> None:
    """Download, and print where the files lie."""
    with bad_files():
        out, commit = download(args.repo, args.revision, args.out, args.allow_pickle)
    print(f"{args.repo} at {commit} (repeat with --revision {commit})", file=sys.stderr)
    print(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code (2 usage, 3 nothing usable was found)."""
    parser = command_parser("scripts.download", __doc__)
    add = parser.add_argument
    add("repo", metavar="REPO", help="OWNER/NAME on the hub")
    add("--revision", default="main", help="branch, tag or commit (default main); printed as a commit")
    add("--out", type=Path, metavar="DIR", help="default: ./NAME")
    add("--allow-pickle", action="store_true", help="take .bin / .pth where there is no safetensors")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    sys.exit(main())
