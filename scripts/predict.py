"""Write the pages that predict step times on GPUs that nobody here has. They are no measurements, and they say so.

python -m scripts.kernel_report --json docs/kernel_report_triton39.json   # instruction counts, on any machine
python -m scripts.predict --write docs/rtx3090_prediction.md
python -m scripts.predict --two-gpus --write docs/two_gpus_prediction.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench import prediction, prediction_ranks
from support.errors import command_parser, run_command
from support.files import check_folder, write_text


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.predict", __doc__)
    parser.add_argument(
        "--report", type=Path, default=prediction.REPORT, help="JSON of scripts.kernel_report --arch 86"
    )
    parser.add_argument("--two-gpus", action="store_true", help="LLaMA-2-70B on two cards instead of 7B and 8B on one")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    parser.add_argument("--json", action="store_true", help="print the rows of one card as JSON instead")
    args = parser.parse_args(argv)

    def show() -> None:
        check_folder("--write", args.write)
        report, gpu = prediction.read_report(args.report), prediction.Gpu()
        if args.json:
            print(json.dumps([prediction.predict(setup, report, gpu) for setup in prediction.SETUPS], indent=1))
            return
        text = (prediction_ranks if args.two_gpus else prediction).page(report, gpu)
        if args.write:
            write_text(args.write, text)
        print(text)

    return run_command(show, args.debug)


if __name__ == "__main__":
    sys.exit(main())
