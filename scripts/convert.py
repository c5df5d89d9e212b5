"""Convert a checkpoint to our directory format (Hugging Face names, one model.safetensors), or an EAGLE head.

    python -m scripts.convert SRC DST [--dtype bfloat16]        Hugging Face .safetensors / .bin, Meta consolidated.*.pth
    python -m scripts.convert FILE.gguf DST                     GGUF; quantized weights become floats
    python -m scripts.convert --eagle HEAD --target DIR DST     any published head -> SafeAILab tensor names, safetensors
    python -m scripts.convert HEAD FILE.gguf --target MODEL     EAGLE-3 or a block head -> GGUF, for llama.cpp

Pickle files are read here with `weights_only=True`; the result holds none. Needs memory for one copy of the weights.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from families.config import DTYPES
from support.errors import UsageError, bad_files, command_parser, run_command
from support.files import clean_up, directory_written_whole, written_whole
from support.progress import Progress
from weights.assistant import check_written
from weights.block_heads import read_head, save_block
from weights.checkpoint import Checkpoint
from weights.gguf_writer import write_head
from weights.heads import EagleConfig, save_eagle
from weights.hf import save_hf


def convert_model(source: Path, destination: Path, dtype: str | None) -> None:
    """Read a model strictly and write it as our directory, with its tokenizer's files. Raises ValueError."""
    checkpoint = Checkpoint.open(source)
    if (quantization := checkpoint.quantization) and not checkpoint.gguf:
        raise ValueError(f"{source} is quantized ({quantization}). Convert the original instead.")
    progress = Progress()

    def show(done: int, total: int, name: str) -> None:
        progress.of(done, total, f"reading {done / 1e9:.1f} of {total / 1e9:.1f} GB  {name[:60]}")

    model = checkpoint.load(dtype=DTYPES.get(dtype), progress=show, max_positions=1, floats=True)
    with directory_written_whole(destination, keep=True) as unfinished:
        save_hf(model, unfinished)
        checkpoint.copy_texts(unfinished)


def convert_eagle(head: Path, target: Path, destination: Path, overrides: Sequence[str], dtype: str | None) -> None:
    """Read a head strictly for the model in `target`, and write an EAGLE head under SafeAILab's tensor names, and another
    one as its makers do. If the destination is a .gguf file, write what llama.cpp reads. Raises ValueError.

    `overrides` are KEY=VALUE pairs for its config. What had to be assumed is printed.
    """
    for pair in overrides:
        if "=" not in pair:
            raise UsageError(f"--eagle-config {pair}: expected key=value.")
    read = read_head(head, Checkpoint.open(target).config, dict(pair.split("=", 1) for pair in overrides))
    check_written(read.config)
    if destination.suffix == ".gguf":
        with written_whole(destination) as unfinished:
            note = write_head(unfinished, read, target, DTYPES[dtype or "float16"])
        if note:
            print(f"note  {note}", file=sys.stderr)
        return
    with directory_written_whole(destination, keep=True) as unfinished:
        save = save_eagle if isinstance(read.config, EagleConfig) else save_block
        save(read.config, read.tensors, unfinished)
    for note in read.notes:
        print(f"note  {note}", file=sys.stderr)


def run(args: argparse.Namespace) -> None:
    """Convert, and print where the files lie."""
    out = args.destination
    clean_up(out)
    if out.suffix == ".gguf" and out.exists():
        raise UsageError(f"{out} exists already. Choose another name or remove it.")
    if (out / "config.json").exists():
        raise UsageError(f"{out} already holds a model. Choose another directory or remove it.")
    with bad_files():
        if args.eagle:
            convert_eagle(args.eagle, args.target, out, args.eagle_config, args.dtype)
        else:
            convert_model(args.source, out, args.dtype)
    print(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code (2 usage, 3 bad file, 4 memory, 5 internal)."""
    parser = command_parser("scripts.convert", __doc__)
    add = parser.add_argument
    add("source", nargs="?", type=Path, metavar="SRC", help="model directory or .gguf file (not with --eagle)")
    add("destination", type=Path, metavar="DST", help="directory, or for a head a .gguf file; must not be there yet")
    add("--dtype", choices=sorted(DTYPES), help="default: as stored")
    add("--eagle", type=Path, metavar="HEAD", help="convert this head (file or directory) instead")
    add("--target", type=Path, metavar="DIR", help="the model the head was made for")
    add("--eagle-config", action="append", default=[], metavar="KEY=VALUE", help="e.g. rope_theta=5e5")
    args = parser.parse_args(argv)
    if args.target and args.source and args.destination.suffix == ".gguf":
        args.eagle, args.source = args.source, None
    if bool(args.eagle) != bool(args.target) or bool(args.eagle) == bool(args.source):
        parser.error("give SRC DST, or --eagle HEAD --target DIR DST, or HEAD FILE.gguf --target MODEL")
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    sys.exit(main())
