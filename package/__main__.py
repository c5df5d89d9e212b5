"""The command `eaglet`, which `pip install .` makes; `python -m eaglet` is the same.

    eaglet generate -p "Why is the sky blue?" --checkpoint DIR    decode one request
    eaglet chat --checkpoint DIR                                  talk to an instruct model
    eaglet quantize --checkpoint DIR --mode int4                  write a model with int8 or int4 weights
    eaglet bench --checkpoint DIR                                 measure, in pairs with plain decoding
    eaglet train --checkpoint DIR --data FILE --out HEAD          train an EAGLE head
    eaglet serve --checkpoint DIR                                 serve OpenAI's API

`eaglet COMMAND --help` lists the options of a command.
"""

import importlib
import sys

from support.interrupts import leave_at_once

# Command -> the module whose `main` it runs, and the arguments that it puts first.
COMMANDS = {
    "generate": ("generate", []),
    "chat": ("generate", ["--chat"]),
    "quantize": ("quantize", []),
    "bench": ("scripts.bench", []),
    "train": ("scripts.train_eagle", []),
    "serve": ("scripts.serve", []),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns the exit code."""
    leave_at_once()
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if command == "--version":
        from generate import VERSION

        print(f"eaglet {VERSION}")
        return 0
    if command not in COMMANDS:
        from support.errors import USAGE

        known = f"there are {', '.join(COMMANDS)} (eaglet --help explains them)"
        print(f"error  {command!r:.60} is no command; {known}", file=sys.stderr)
        return USAGE
    name, first = COMMANDS[command]
    home = __package__.partition(".")[0]  # "eaglet", or "package" in the repository
    sys.argv[0] = f"eaglet {command}"  # what the command's --help calls it
    module = importlib.import_module(name if home == "package" else f"{home}.{name}")
    return module.main([*first, *rest])


if __name__ == "__main__":
    sys.exit(main())
