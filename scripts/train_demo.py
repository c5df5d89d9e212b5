"""Train the embedded demo model: a small LLaMA on the CPython standard library's own sources.

    python -m scripts.train_demo                      # the recipe that made demo/: over an hour on 2 CPU cores
    python -m scripts.train_demo --steps 200 --out runs/try --work runs/try-work

The result depends on --seed alone, on one machine with one number of threads. The training state is kept in
WORK/train_state.pt: after Ctrl-C the same command goes on from there, to the same weights. The corpus is the running
interpreter's standard library: every .py file except tests, generated tables and the modules held out for measuring.
"""

import argparse
import functools
import hashlib
import platform
import shutil
import sys
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor

from families.config import ModelConfig
from model import Transformer
from support.errors import BadFileError, at_least
from support.files import directory_written_whole, write_json, write_text, written_whole
from support.texts import HELD_OUT, LEFT_OUT, read_source, stdlib_files
from training.loop import Recipe, Run, World, init_weights, optimizers, run, run_parser, update
from weights.hf import save_hf

VOCAB_SIZE = 4096
LENGTHS = (512, 1024)  # of the training windows: in the first 60 % of the steps, and after
SAVE_EVERY = 200  # steps
RECIPE = Recipe(side_lr=4e-3)
CONFIG = ModelConfig(
    model_type="llama",
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)
TOKENIZER = {"tokenizer_class": "LlamaTokenizer", "model_max_length": 2048, "legacy": False}
TOKENIZER |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOKENIZER |= {"add_bos_token": True, "add_eos_token": False, "add_prefix_space": False}
CARD = """# The demo model

A LLaMA-architecture model of {parameters:.2f} M parameters, made by `python -m scripts.train_demo` from the standard
library of CPython {version}: {steps} steps of {batch_tokens} tokens, seed {seed}, {minutes:.0f} minutes on a CPU, torch
{torch}. The last training loss was {loss:.3f} nats per token. Left out were {left_out}. Held out for measurements, as by
`python -m scripts.evaluate`, were {held_out}.

The sources are under the PSF licence. The weights are a small statistical summary of them. The model writes text that
looks like Python, not correct programs.
"""


def train_tokenizer(files: list[Path], out: Path) -> None:
    """Write a sentencepiece BPE model with byte fallback that keeps every space of the source."""
    with written_whole(out) as temporary, open(temporary, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for path in files for line in read_source(path).split("\n")),
            model_writer=file,
            model_type="bpe",
            vocab_size=VOCAB_SIZE,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            split_digits=True,
            max_sentence_length=16384,
            input_sentence_size=400_000,
            minloglevel=2,
        )


def load_corpus(tokenizer: Path) -> np.ndarray:
    """The training files as one stream of tokens, int32: BOS + file + EOS, one after another.

    `tokenizer` is a file that is made first if it is missing. Raises BadFileError in one line for one that this command
    did not make.
    """
    files = stdlib_files()[0]
    if not tokenizer.exists():
        print("training the tokenizer ...", file=sys.stderr)
        train_tokenizer(files, tokenizer)
    advice = "Delete it or give another --work."
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    except (RuntimeError, OSError) as error:
        raise BadFileError(f"{tokenizer}: not a sentencepiece model. {advice}") from error
    if (size := processor.vocab_size()) != VOCAB_SIZE:
        raise BadFileError(f"{tokenizer} has {size} pieces, expected {VOCAB_SIZE}. {advice}")
    texts = processor.encode(list(map(read_source, files)), add_bos=True, add_eos=True)
    return np.array([i for text in texts for i in text], dtype=np.int32)


def batch(stream: np.ndarray, rng: np.random.Generator, count: int, length: int) -> Tensor:
    """`count` windows of `length` + 1 tokens at random places, int64 [count, length + 1]."""
    starts = rng.integers(0, len(stream) - length - 1, count)
    return torch.from_numpy(stream[starts[:, None] + np.arange(length + 1)].astype(np.int64))


def train(args: argparse.Namespace) -> None:
    """Train in args.work, going on from what lies there, then write args.out.

    Raises BadFileError in one line for a work directory of another run, and KeyboardInterrupt after Ctrl-C.
    """
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(work / "tokenizer.model")
    print(f"corpus  {len(corpus) / 1e6:.2f} M tokens", file=sys.stderr)
    torch.manual_seed(args.seed)
    model = Transformer(CONFIG)
    init_weights(model, torch.Generator().manual_seed(args.seed))
    model.rotary.build("cpu")
    optims = optimizers(model, RECIPE)

    def train_step(step: int) -> tuple[float, list[float], int]:
        rng = np.random.default_rng((args.seed, step))
        length = LENGTHS[step >= 0.6 * args.steps]
        tokens = batch(corpus, rng, args.batch_tokens // length, length)
        hidden_states, _ = model.forward_train(tokens[:, :-1])
        loss = F.cross_entropy(model.logits(hidden_states).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        update(optims, RECIPE.factor(step, run.share))
        return float(loss.detach()), [], args.batch_tokens

    identity = {"--steps": args.steps, "--seed": args.seed, "--batch-tokens": args.batch_tokens, "model": repr(CONFIG)}
    identity["corpus"] = hashlib.sha256(corpus.tobytes()).hexdigest()  # another Python has another library
    run = Run(model, optims, identity, work / "train_state.pt", World(0, 1, torch.device("cpu")), args.steps)
    run.fit(train_step, SAVE_EVERY)
    export(model, run, args)


def export(model: Transformer, run: Run, args: argparse.Namespace) -> None:
    """Write the Hugging Face directory in bfloat16, and CARD.md."""
    out = Path(args.out)
    card = CARD.format(
        **vars(args),
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        version=platform.python_version(),
        left_out=", ".join(LEFT_OUT),
        held_out=", ".join(HELD_OUT),
        minutes=run.seconds / 60,
        torch=torch.__version__,
        loss=functools.reduce(lambda loss, newer: 0.98 * loss + 0.02 * newer, run.curve),
    )
    with directory_written_whole(out, keep=True) as unfinished:
        save_hf(model.eval().to(torch.bfloat16), unfinished)
        shutil.copyfile(Path(args.work) / "tokenizer.model", unfinished / "tokenizer.model")
        write_json(unfinished / "tokenizer_config.json", TOKENIZER)
        write_json(unfinished / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
        write_text(unfinished / "CARD.md", card)
    print(f"wrote {out}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 usage, 3 bad work directory or file, 130 Ctrl-C)."""
    parser = run_parser("scripts.train_demo", __doc__, steps=1250)
    parser.add_argument("--out", default="demo")
    parser.add_argument("--work", default="runs/train_demo", help="tokenizer, training state")
    parser.add_argument("--batch-tokens", type=at_least(max(LENGTHS)), default=4096)
    return run(parser.parse_args(argv), train)


if __name__ == "__main__":
    sys.exit(main())
