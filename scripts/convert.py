"""Convert a checkpoint to our directory format (Hugging Face names, one model.safetensors), or an EAGLE head.

    python -m scripts.convert SRC DST [--dtype bfloat16]        Hugging Face .safetensors / .bin, Meta consolidated.*.pth
    python -m scripts.convert --eagle HEAD --target DIR DST     any published head -> SafeAILab tensor names, safetensors

Pickle files are read here with `weights_only=True`; the result holds none. Needs memory for one copy of the weights.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from model import DTYPES
from weights.checkpoint import load_config, load_model
from weights.heads import read_eagle, save_eagle
from weights.hf import save_hf

TEXT_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
    "LICENSE.txt",
    "USE_POLICY.md",
)


def convert_model(source: Path, destination: Path, dtype: str | None = None) -> None:
    """Read a model strictly, write it as our directory with its tokenizer files beside it. Raises ValueError."""
    model = load_model(
        source, dtype=DTYPES[dtype] if dtype else None, progress=show_progress, max_positions=1
    )
    save_hf(model, destination)
    files = [source / name for name in TEXT_FILES]
    if (source / "params.json").is_file():  # Meta keeps the tokenizer one folder up, as load_tokenizer knows
        files.insert(0, source.absolute().parent / "tokenizer.model")
    for file in files:  # the folder's own tokenizer.model comes later and wins
        if file.is_file():
            shutil.copy(file, destination / file.name)


def convert_eagle(head: Path, target: Path, destination: Path, overrides: dict[str, str]) -> list[str]:
    """Read a head strictly for the model in `target`, write it under SafeAILab tensor names; returns what was assumed."""
    read = read_eagle(head, load_config(target), overrides)
    save_eagle(read.config, read.tensors, destination)
    return read.notes


def show_progress(done: int, total: int, name: str) -> None:
    """A line that overwrites itself, on terminals only."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(
            f"\rreading {done / 1e9:6.1f} of {total / 1e9:.1f} GB  {name[:60]:60}", end=end, file=sys.stderr
        )


def parse_overrides(pairs: Sequence[str]) -> dict[str, str]:
    """['rope_theta=5e5'] -> {'rope_theta': '5e5'}. ValueError for anything without '='."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--eagle-config {pair}: expected key=value.")
    return dict(pair.split("=", 1) for pair in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m scripts.convert", description=__doc__.splitlines()[0])
    parser.add_argument(
        "source", nargs="?", type=Path, metavar="SRC", help="model directory (not with --eagle)"
    )
    parser.add_argument(
        "destination", type=Path, metavar="DST", help="directory to write; must not hold a model yet"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: as stored")
    parser.add_argument(
        "--eagle", type=Path, metavar="HEAD", help="convert this head (file or directory) instead"
    )
    parser.add_argument("--target", type=Path, metavar="DIR", help="the model the head was made for")
    parser.add_argument(
        "--eagle-config", action="append", default=[], metavar="KEY=VALUE", help="e.g. rope_theta=5e5"
    )
    args = parser.parse_args(argv)
    if bool(args.eagle) != bool(args.target) or bool(args.eagle) == bool(args.source):
        parser.error("give SRC DST, or --eagle HEAD --target DIR DST")
    try:
        if (args.destination / "config.json").exists():
            raise ValueError(
                f"{args.destination} already holds a model. Choose another directory or remove it."
            )
        if args.eagle:
            notes = convert_eagle(
                args.eagle, args.target, args.destination, parse_overrides(args.eagle_config)
            )
            print("".join(f"note  {note}\n" for note in notes), end="", file=sys.stderr)
        else:
            convert_model(args.source, args.destination, args.dtype)
    except (ValueError, OSError) as error:
        print(f"error  {error}", file=sys.stderr)
        return 3
    print(args.destination)
    return 0


if __name__ == "__main__":
    sys.exit(main())
