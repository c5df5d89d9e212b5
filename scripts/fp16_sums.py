"""What sums in fp16 cost int4 in quality, emulated on a CPU.

    python -m scripts.fp16_sums --checkpoint demo [--tokens 1152] [--group-size 128]

On GeForce cards our int4 kernel adds the products of a group in fp16 (`kernels.tuned.LinearConfig.accumulate`). Here
every linear but the LM head does so, too. It rounds its sum to fp16 after every 8 products, at least as often as a tensor
core. The other side adds in fp32. Both use the same weights, rounded to int4, and the same fp16 activations. The command
prints one JSON line: the perplexities, the divergence, and the largest sum beside the limit of fp16.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn

import kernels
from model import Transformer
from support.errors import at_least, command_parser, run_command
from support.texts import stdlib_texts, token_windows
from tokenizer import load_tokenizer
from weights.checkpoint import Checkpoint
from weights.quantized import QuantLinear, QuantSpec, replace_module
from weights.rounding import Tally, quantize_

ROUNDED_AFTER = 8  # products
CODES_DIVIDED_BY = 16  # as in `kernels.packing.decode_ptx`


class Emulated(nn.Module):
    """An int4 linear whose sums of a group are fp32 or, with `half` set, fp16."""

    def __init__(self, linear: QuantLinear):
        super().__init__()
        self.group = linear.group_size
        self.scales = linear.scales.float().T  # [N, K/G]
        self.codes = (linear.dequantize().unflatten(1, (-1, self.group)) / self.scales[..., None]).round()
        self.bias = linear.bias
        self.half = False
        self.largest = 0.0

    def forward(self, x: Tensor, residual: Tensor | None = None, gated: bool = False) -> Tensor:
        groups = x.half().float().unflatten(-1, (-1, self.group))
        y = torch.zeros(*x.shape[:-1], len(self.codes))
        for g in range(groups.shape[-2]):
            y += self._group_sum(groups[..., g, :], self.codes[:, g]) * self.scales[:, g]
        return kernels.epilogue(y.half().float(), self.bias, residual, gated)

    def _group_sum(self, x: Tensor, codes: Tensor) -> Tensor:
        if not self.half:
            return x @ codes.T
        total = torch.zeros(*x.shape[:-1], len(codes))
        for part in range(0, self.group, ROUNDED_AFTER):
            columns = slice(part, part + ROUNDED_AFTER)
            total = (total + x[..., columns] @ codes[:, columns].T / CODES_DIVIDED_BY).half().float()
        self.largest = max(self.largest, total.abs().max().item())
        return total * CODES_DIVIDED_BY


@torch.no_grad()
def compare(model: Transformer, windows: Tensor, group_size: int) -> dict[str, float]:
    """`Tally.report` of fp32 sums against fp16 sums on token windows [R, T], and the largest fp16 sum.

    The float model is rounded to int4 in place.
    """
    quantize_(model, QuantSpec("int4", group_size, lm_head="fp16"))
    linears = []
    for name, child in list(model.named_modules()):
        if isinstance(child, QuantLinear):
            linears.append(Emulated(child))
            replace_module(model, name, linears[-1])
    tally = Tally()
    for row in windows:
        logits = []
        for half in (False, True):
            for linear in linears:
                linear.half = half
            hidden_states, _ = model.forward_train(row[None, :-1])
            logits.append(model.logits(hidden_states)[0])
        tally.add(*logits, row[1:])
    largest = max(linear.largest for linear in linears)
    return tally.report() | {"positions": tally.positions, "largest_sum": largest, "limit": 65504.0}


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.fp16_sums", __doc__)
    parser.add_argument("--checkpoint", default="demo", help="a float model")
    parser.add_argument("--tokens", type=at_least(2), default=1152, help="of held-out standard library modules")
    parser.add_argument("--group-size", type=int, default=128, choices=(32, 64, 128))
    args = parser.parse_args(argv)

    def body() -> None:
        checkpoint = Checkpoint.open(args.checkpoint)
        length = min(385, args.tokens)
        model = checkpoint.load(torch.device("cpu"), torch.float32, None, length)
        tokenizer = load_tokenizer(checkpoint.tokenizer_source, checkpoint.config.vocab_size)
        texts, rows = stdlib_texts(held_out=True), max(1, args.tokens // length)
        windows = token_windows(texts, tokenizer, checkpoint.config.vocab_size, rows, length)
        print(json.dumps({"checkpoint": args.checkpoint} | compare(model, windows, args.group_size)))

    return run_command(body, args.debug)


if __name__ == "__main__":
    sys.exit(main())
