"""`--sha256`: whether a model's files are the ones that somebody took the sha256 of.

A damaged weight may stay a plausible number. No reader can tell then, only a checksum.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from support.files import read_text
from support.reader import refusal
from weights.files import tensor_files

SUMS = "SHA256SUMS"  # what `sha256sum * > SHA256SUMS` writes
DIGEST = re.compile("[0-9a-fA-F]{64}")
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *]([\w.][\w.-]*)")


def check_sha256(model: Path, wanted: str) -> None:
    """Compare the files of a model, a folder or a GGUF file, with their digests. Every byte of them is read.

    wanted: the digest of the one file with weights, or `stored` for those in SHA256SUMS beside it. Raises ValueError in
    one line for a file that differs, and for a file with weights that is not listed.
    """
    folder = model if model.is_dir() else model.parent
    weights = [model] if model.is_file() else tensor_files(model) or sorted(model.glob("consolidated.*.pth"))
    if wanted == "stored":
        lines = [line for line in read_text(folder / SUMS).splitlines() if line.strip()]
        found = [LINE.fullmatch(line) for line in lines]
        if None in found:
            raise refusal(
                folder / SUMS, f"line {found.index(None) + 1} is not a digest and the name of a file beside it."
            )
        digests = {line[2]: line[1] for line in found}
        if missing := [file.name for file in weights if file.name not in digests]:
            raise refusal(folder / SUMS, f"{missing[0]} is not in it.", "Run sha256sum on all files of the model.")
        files = weights if model.is_file() else [folder / name for name in digests]
    elif not DIGEST.fullmatch(wanted) or len(weights) != 1:
        problem = f"{wanted!r:.80} is neither `stored` nor 64 hexadecimal digits"
        problem = f"{len(weights)} files with weights need `stored`" if DIGEST.fullmatch(wanted) else problem
        raise ValueError(f"--sha256: {problem}. List the digests in {SUMS} and pass `stored`.")
    else:
        files, digests = weights, {weights[0].name: wanted}
    for file in files:
        try:
            with open(file, "rb") as data:
                digest = hashlib.file_digest(data, "sha256").hexdigest()
        except OSError as error:
            raise refusal(file, f"cannot be read ({error.strerror}).") from error
        if digest != digests[file.name].lower():
            raise refusal(file, f"its sha256 is {digest}, expected {digests[file.name]}.", "Download it again.")
