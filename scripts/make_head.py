"""A draft head for any model, by one command: text of the model itself, training, rounding, measurements.

    python -m scripts.make_head --checkpoint DIR                       # eight hours, to heads/NAME-eagle3
    python -m scripts.make_head --checkpoint DIR --hours 20 --out HEAD
    python generate.py --checkpoint DIR --eagle HEAD                   # at any time after the first round

The model writes questions and answers (a model without a chat template: texts), and the head learns to draft them, in
rounds of growing length. After each round the best head so far lies at --out. At the end it is rounded to the format of
the model and measured, also behind long chats: tokens per step, and the fastest tree and window on this machine. The same
command goes on after any interruption, and with more --hours after its end. The output of all parts is in --work/log.txt.
"""

import argparse
import shutil
import sys
from itertools import islice
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import torch

from bench import behind
from loading.drafting import own_window, read_drafter, tuned_path
from loading.memory import model_bytes
from loading.options import LoadOptions
from quantize import CALIBRATION_WINDOWS, WINDOW
from support import cache
from support.errors import UsageError, above_zero, at_least, command_parser, run_command
from support.files import append_json_lines, directory_written_whole, read_json, read_json_lines, write_json, write_text
from support.machine import cpu_flags, default_device, default_threads, free_memory, size_text
from support.progress import say
from support.stages import Stages
from text.tokenizer import load_tokenizer
from training.data import question_of
from training.losses import feature_bytes

ROUNDS = 3  # at most; each one takes twice the time of the one before
LEAST_ROUND = 20  # times what a training takes besides its steps
WRITING = 0.4  # share of a round in which the model writes; the head learns in the rest
END = 0.08  # share of all the time that rounding and measuring may take
ROUNDING = 0.4  # share of the end in which it is rounded
WHOLE_END = 43_000  # tokens of plain decoding that take about as long as everything that is measured at the end
WHOLE_CALIBRATION = CALIBRATION_WINDOWS * WINDOW  # tokens of text that GPTQ sees at most
HELD_OUT = 96  # questions that are tried for the text that is only measured on
FEWEST = 8  # of the texts among these
BEHIND = (500, 4000)  # tokens of the chats that the head is measured behind
ALIKE = 0.97  # of the tau before: a later head with so much counts as better, because eight questions tell no more
LEAST = 10.0  # seconds of text and of training in a round
GIB = 1 << 30
# Options of scripts.train_eagle, as they trained the heads of SmolLM2 (docs/training.md).
TRAINING: dict[int, dict[str, object]] = {
    1: {"ttt_steps": 2, "feature_weight": 0.3, "token_weight": 1, "lr": 0.01, "side_lr": 0.001},
    3: {"ttt_steps": 3, "row_share": 0.33, "noise_share": 0.5, "lr": 0.02, "side_lr": 0.001, "window": 128},
}


class Maker:
    """One run of the command. What an earlier run of it finished is passed over."""

    def __init__(self, args: argparse.Namespace):
        """Raises UsageError or ValueError in one line for what cannot work."""
        self.args, self.out, self.work = args, Path(args.out), Path(args.work)
        names = ("text", "held_out", "questions")
        self.text, self.held_out, self.questions = (self.work / f"{name}.jsonl" for name in names)
        self.options = LoadOptions(args.checkpoint, device=args.device)
        self.checkpoint = self.options.open_checkpoint()
        self.config = self.checkpoint.config
        self.tokenizer = load_tokenizer(self.checkpoint.tokenizer_source, self.config.vocab_size)
        if self.tokenizer is None:
            raise UsageError(f"--checkpoint {args.checkpoint}: it has no tokenizer, so it cannot write text.")
        self.compiled = args.device == "cuda"  # when it is measured
        self.chats = bool(self.tokenizer.chat_template_source)
        processes = self._processes()
        identity = {f"--{name}": vars(args)[name] for name in ("version", "seed", "device", "start", "text")}
        identity |= {"--checkpoint": str(Path(args.checkpoint).resolve()), "--out": str(self.out)}
        self.stages = Stages(self.work, args.hours, identity)
        # A training that was interrupted goes on only with the same processes and features as before.
        self.processes = self.stages.kept("processes", lambda: processes)
        if not self.stages.kept("free", lambda: args.force or not self.out.exists()):
            raise UsageError(f"--out {self.out} exists; choose another name, or --force to replace it.")
        if args.text and not self.text.exists():
            shutil.copy(args.text, self.text)

    def _processes(self) -> int:
        """How many processes train. Raises UsageError where the memory is too small for one."""
        if self.args.device == "cuda":
            return torch.cuda.device_count()
        each = model_bytes(self.checkpoint, self.options.with_defaults(self.config)) + GIB
        free = free_memory(torch.device(self.args.device))
        if each > free:
            raise UsageError(f"this takes at least {size_text(each)} of memory, and {size_text(free)} are free.")
        return 2 if default_threads() > 1 and 2 * each < free else 1

    def _stage(
        self, name: str, title: str, script: str, processes: int = 1, fine: tuple[int, ...] = (0,), **options: object
    ) -> None:  # fmt: skip
        """Run a script with these options, of which None or False are left out."""
        command: list[object] = [script]
        for option, value in {"checkpoint": self.args.checkpoint, "device": self.args.device, **options}.items():
            if value is not None and value is not False:
                command += [f"--{option.replace('_', '-')}", *([] if value is True else [value])]
        self.stages.run(name, title, command, processes, fine)

    def _write(self, name: str, title: str, out: Path, hours: float, **more: object) -> None:
        """A stage in which the model writes text."""
        ctx = min(1024, self.config.max_positions)
        begin, rest = (128, 256) if self.chats else (32, 224)
        lengths = {"ctx": ctx, "question_tokens": min(begin, ctx // 4), "answer_tokens": min(rest, ctx // 2)}
        self._stage(name, title, "scripts.make_chats", out=out, hours=hours, **lengths, **more)

    def _train(self, name: str, title: str, data: Path, out: Path, **more: object) -> None:
        """A stage of training."""
        length, work = min(2048, self.config.max_positions), self.work / "training"
        if not self.stages.spent(name):
            (work / "train_state.pt").unlink(missing_ok=True)  # of the stage before
        room = shutil.disk_usage(self.work).free - GIB + sum(file.stat().st_size for file in work.glob("features-*"))
        keep = self.stages.kept(f"{name} keeps", lambda: self.chats and self._disk(self._tokens(data)) < room)
        half = self.args.device == "cpu" and bool({"amx_bf16", "avx512_bf16"} & cpu_flags())
        more |= TRAINING[int(self.args.version)] | {"version": self.args.version, "seed": self.args.seed}
        self._stage(
            name, title, "scripts.train_eagle", self.processes, data=data, out=out, held_out=self.held_out, work=work,
            batch=4, accumulate=max(1, 4 // self.processes), length=length, max_positions=length, eval_every=0,
            save_every=20, autocast="on" if half else "auto", force=True, keep_features=keep, **more,
        )  # fmt: skip

    def _measure(self, name: str, title: str, head: Path, **more: object) -> list[dict[str, Any]]:
        """A stage that measures a head beside plain decoding. Returns the rows of the table."""
        found = self.work / f"{name}.jsonl"
        more |= {"eagle": head, "questions": self.questions, "reps": 1, "json": found, "compile": self.compiled}
        self._stage(name, title, "scripts.bench", fine=(0, 1), quiet=True, **more)  # 1: an arm of it has a finding
        return read_json_lines(found)[-1]["rows"]

    def _round_head(self, name: str, title: str, head: Path, text: Path, tokens: float) -> Path:
        """A stage that rounds a head as its model is, by GPTQ along so many tokens of a text. Returns where it lies."""
        fits = self.config.hidden_size % 32 == self.config.intermediate_size % 32 == 0
        mode = "int4" if "int4" in self.checkpoint.quantization and fits and self.args.version != 1 else "int8"
        out, calibration = self.work / name.replace(" ", ""), self.work / f"calibration-{text.name}"
        if name not in self.stages.state["done"]:
            shutil.rmtree(out, ignore_errors=True)
            lines = text.read_text().splitlines(keepends=True)
            write_text(calibration, "".join(lines[: max(4, round(tokens / self._tokens(text) * len(lines)))]))
        how = {"mode": mode, "lm_head": mode, "group_size": 32, "algorithm": "gptq", "calibration": calibration}
        self._stage(name, title, "quantize", eagle=head, out=out, head_only=True, **how)
        return out

    def _tokens(self, file: Path) -> float:
        """About how many tokens a file of texts has."""
        with open(file, encoding="utf-8") as read:
            lines = list(islice(read, HELD_OUT))
        each = sum(len(self.tokenizer.encode(line)) for line in lines) / max(1, sum(map(len, lines)))
        return each * file.stat().st_size

    def _disk(self, tokens: float) -> float:
        """Bytes that the features of so many tokens take."""
        hidden = self.config.hidden_size
        return feature_bytes(tokens, hidden, 0 if self.args.version == 1 else 3 * hidden)

    def prepare(self) -> None:
        """Text that is only measured on, and a rehearsal: what cannot work is refused here, in the first minutes."""
        stages, args, first = self.stages, self.args, self.work / "try"
        least = max(0.05 * args.hours, 1 / 60)
        self._write("held out", "first texts", self.held_out, least, count=HELD_OUT, seed=args.seed + 10**6)
        records, took = read_json_lines(self.held_out), stages.spent("held out")
        if len(records) < FEWEST:
            wrote = f"in {took:.0f} s the model wrote {len(records)} texts that end and do not repeat"
            raise UsageError(f"{wrote}; needed are {FEWEST}. Give more --hours, or train on other data.")
        if not self.questions.exists():
            turns = map(question_of, records)
            append_json_lines(self.questions, *({"question_id": n, "turns": [turn]} for n, turn in enumerate(turns)))
        self._train("try", "first try", self.held_out, first, steps=2, eval_prompts=1, eval_tokens=4, draft_vocab=8)
        plain = self._measure("speed", "first try", first, limit=2, max_new_tokens=32, temperature=0)[0]
        self.measuring = WHOLE_END / (plain["tokens_per_second"] or plain["request_tokens_per_second"])
        self.rounding = 0.0
        if self.checkpoint.quantization:
            self._round_head("rounded", "first try", first, self.held_out, WHOLE_CALIBRATION / 16)
            self.rounding = 16 * stages.spent("rounded")
        disk = self._disk(self._tokens(self.held_out) / took * WRITING * stages.total) * self.chats + GIB
        disk = min(disk, shutil.disk_usage(self.work).free)
        unit = 1 if sys.platform == "darwin" else 1024  # bytes
        most = stages.kept("memory", lambda: getrusage(RUSAGE_CHILDREN).ru_maxrss * unit * self.processes)
        takes = f"up to {size_text(disk)} of disk in {self.work}, and about {size_text(most)} of memory"
        say(f"this takes {args.hours:g} hours ({stages.seconds / 3600:.2f} are over), {takes}")

    def rounds(self) -> int:
        """Write and train in turns while there is time, and publish the best head. Returns the number of rounds."""
        stages, number = self.stages, 0
        beside = stages.kept("beside", lambda: stages.spent("try"))  # what a training takes besides its steps
        while True:
            left = stages.total - stages.seconds - min(self.measuring + self.rounding, END * stages.total)
            if number and f"round {number + 1}" not in stages.state["kept"] and left < 0.1 * stages.total:
                return number
            number += 1
            fitting = [n for n in range(1, ROUNDS + 1) if left > (2**n - 1) * LEAST_ROUND * beside]
            rounds = stages.kept("rounds", lambda fitting=fitting: max(fitting, default=1))
            share = 2 ** max(1, rounds - number + 1) - 1  # this round is one of so many equal parts of what is left
            seconds = stages.kept(f"round {number}", lambda left=left, share=share: left / share)
            writing = max(LEAST, WRITING * seconds - stages.spent(f"text {number}"))
            more = {"count": 10**7, "seed": self.args.seed, "apart": self.held_out}
            self._write(f"text {number}", f"round {number}, text", self.text, writing / 3600, **more)
            if not self.text.exists():
                raise UsageError(f"the model wrote no text that can be used in {writing:.0f} s; give more --hours.")
            rest = max(seconds - stages.spent(f"text {number}") - beside, 0.3 * seconds, LEAST)
            hours = stages.kept(f"train {number}", lambda rest=rest: rest / 3600)
            self._round(number, hours, number / max(rounds, number))

    def _round(self, number: int, hours: float, share: float) -> None:
        """The training of a round, with this share of the vocabulary. The head is published if it is the best one."""
        kept, vocab, out = self.stages.kept, self.config.vocab_size, self.work / f"head{number}"
        before = self.stages.state["kept"].get(f"best {number - 1}")
        size = max(8, round(share * (vocab if vocab < 8192 else min(vocab // 2, 32768))))
        more: dict[str, object] = {"hours": hours, "draft_vocab": None if self.args.start else size}
        if start := before or self.args.start:
            more |= {"start": start, "average": 0.5}
        self._train(f"train {number}", f"round {number}, training", self.text, out, **more)
        cards = {head: read_json(Path(head) / "CARD.json") for head in (before, str(out)) if head}
        taus = {head: card["tau_greedy"] + card["tau_t1"] for head, card in cards.items()}
        better = before is None or taus[str(out)] >= ALIKE * taus[before]
        if kept(f"best {number}", lambda: str(out) if better else before) == str(out):
            self._publish(out)

    def _publish(self, head: Path, **card: Any) -> None:
        """Put a head in its place at --out, with more in its card."""
        with directory_written_whole(self.out) as unfinished:
            shutil.copytree(head, unfinished, dirs_exist_ok=True)
            write_json(unfinished / "CARD.json", read_json(head / "CARD.json") | card)

    def finish(self, number: int) -> str:
        """Round the head as its model is, measure it, and find its tree and window. Returns three lines about these."""
        args, head = self.args, Path(self.stages.state["kept"][f"best {number}"])
        if self.checkpoint.quantization:
            part = min(1.0, ROUNDING * END * self.stages.total / self.rounding)  # of the text that GPTQ may see
            head = self._round_head(f"rounded {number}", "rounding", head, self.text, part * WHOLE_CALIBRATION)
        self._publish(head)
        effort = min(1.0, (1 - ROUNDING) * END * self.stages.total / self.measuring)
        few = {"max_new_tokens": max(16, round(64 * effort))}
        limit = max(1, round(4 * effort))
        rows = self._measure(f"measured {number}", "measuring", self.out, limit=limit, **few)
        room = self.config.max_positions - behind.SLACK - few["max_new_tokens"] if self.chats and effort > 0.5 else 0
        fitting = [length for length in BEHIND if length <= room]
        if fitting:
            lengths = ",".join(map(str, fitting))
            rows += self._measure(f"behind {number}", "measuring", self.out, limit=limit, behind=lengths, **few)
        few |= {"questions": self.questions, "prompts": limit, "reps": 1, "quiet": True, "compile": self.compiled}
        few |= {"eagle": self.out, "behind": max(fitting, default=0)}
        self._stage(f"tuned {number}", "tree and window", "scripts.tune_tree", fine=(0, 1), **few)  # 1: none is better
        options = LoadOptions(args.checkpoint, eagle=str(self.out), device=args.device, compile=self.compiled)
        read = read_drafter(options, self.config, None).head
        tree, window = (tuned_path(options, self.checkpoint, read, kind) for kind in ("json", "window"))
        windows = cache.fetch(window)
        found = {"window": windows.about["window"]} if windows else {}
        keys = ("suite", "temperature", "tau", "accepted_by_depth", "speedup")
        rows = [{key: row[key] for key in keys} for row in rows if row["accepted_by_depth"]]
        self._publish(head, measured=rows, **found)
        gains, shown = [], {"questions": "", "all": f" behind {' and '.join(map(str, fitting))} tokens"}
        for row in (row for row in rows if row["suite"] in shown):
            speed = f" ({row['speedup']['median']:.2f}x of plain decoding)" if row["speedup"] else ""
            gains.append(f"tau {row['tau']:.2f} at T = {row['temperature']:g}{shown[row['suite']]}{speed}")
        winner = read_json(tree)["winner"] if tree.exists() else "the default"
        more = " --compile" * self.compiled + " --tree auto" * tree.exists()
        best = f"tree {winner}, window {found.get('window') or own_window(read.config) or 'the default'}"
        return (
            f"{self.out}: {', '.join(gains) or 'nothing that it drafts is accepted'}\n"
            f"best on this machine: {best}; it took {self.stages.seconds / 3600:.2f} hours\n"
            f"python generate.py --checkpoint {args.checkpoint} --eagle {self.out}{more}"
        )


def run(args: argparse.Namespace) -> None:
    """Make the head, and say what it gains."""
    args.out = args.out or f"heads/{Path(args.checkpoint).resolve().stem}-eagle{args.version:g}"
    args.work = args.work or f"runs/make_head/{Path(args.out).name}"
    maker = Maker(args)
    maker.prepare()
    said = maker.finish(maker.rounds())
    maker.stages.progress.close()
    print(said)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.make_head", __doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="the model: anything that generate.py takes")
    add("--hours", type=above_zero, default=8.0, metavar="H", help="what all of it may take (default: 8)")
    add("--version", type=float, choices=(1, 3, 3.1), default=3, help="generation of EAGLE (default: 3)")
    add("--out", metavar="HEAD", help="folder to write (default: heads/NAME-eagleVERSION)")
    add("--work", metavar="DIR", help="what an interrupted run needs (default: runs/make_head/NAME of --out)")
    add("--device", choices=("cpu", "cuda"), default=default_device())
    add("--start", metavar="HEAD", help="go on from the weights of a head of the same --version")
    add("--text", metavar="FILE", help="conversations that scripts.make_chats wrote with this model, to begin with")
    add("--seed", type=at_least(0), default=0)
    add("--force", action="store_true", help="replace what is at --out")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug, "interrupted; the same command goes on where it was")


if __name__ == "__main__":
    raise SystemExit(main())
