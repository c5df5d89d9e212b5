"""TODO."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import Experts, Transformer
from support.errors import UsageError
from support.files import read_json, write_json
from support.machine import peak_memory
from weights.checkpoint import open_model
from weights.files import Progress, check_entries, check_finite, read_entries, write_safetensors
from weights.hf import build_model, config_to_hf
from weights.quantized import (
    VERSION,
    QuantLinear,
    QuantSpec,
    apply_spec_,
    parameter_sources,
    quantizable,
    set_tensor,
)
from weights.rounding import quantize_gptq, quantize_rtn, relative_error

ABSURD_KL = 2.0  # nats per token: past this the result is broken, not merely bad, and is never written


WINDOW, CALIBRATION_WINDOWS, EVALUATION_WINDOWS, BATCH = 512, 128, 16, 4  # tokens; sequences


COPIED = "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json "


COPIED += "generation_config.json chat_template.jinja chat_template.json"


@dataclass
class Tally:
    """Quality of one model against another on the same tokens, in nats."""

    positions: int = 0
    before: float = 0.0
    after: float = 0.0
    divergence: float = 0.0
    agreed: int = 0

    def add(self, before: Tensor, after: Tensor, targets: Tensor) -> None:
        """Logits [M, V] of both models, targets int64 [M]; 128 rows at a time, large vocabularies are wide."""
        for p, q, ids in zip(before.split(128), after.split(128), targets.split(128), strict=True):
            p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            self.positions += ids.numel()
            self.before += float(F.nll_loss(p, ids, reduction="sum"))
            self.after += float(F.nll_loss(q, ids, reduction="sum"))
            self.divergence += float((p.exp() * (p - q)).sum())
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    def report(self) -> dict[str, float]:
        """Perplexities, mean KL(before || after), share of equal most likely tokens."""
        return {
            "perplexity_before": math.exp(min(self.before / self.positions, 700)),
            "perplexity_after": math.exp(min(self.after / self.positions, 700)),
            "mean_kl": self.divergence / self.positions,
            "top1_agreement": self.agreed / self.positions,
        }


@torch.no_grad()
def measure(before: Transformer, after: Transformer, tokens: Tensor) -> dict[str, float]:
    """`Tally.report` of two loaded models on tokens [W, T + 1]: what a receipt says, computed independently of it."""
    tally = Tally()
    for row in tokens:
        logits = [m.logits(m.forward_train(row[None, :-1].to(m.device))[0])[0].cpu() for m in (before, after)]
        tally.add(*logits, row[1:])
    return tally.report()


@torch.no_grad()
def quantize_module_(
    module: nn.Module,
    prefix: str,
    spec: QuantSpec,
    stored: dict[str, Tensor],
    half: torch.dtype,
    run: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Round the linears of a float module one after the other: each sees what its rounded predecessors produce.

    stored: gets the tensors to write under full names (what is not quantized in dtype `half`); what it holds already is
    used instead of computed. run: feeds the calibration activations through `module` (GPTQ). The module is left with
    the weights that the stored tensors stand for. Returns their relative errors.
    """
    errors = {}
    for _, child, weights, bits in quantizable(module, spec):
        for full, weight in weights.items():
            key = prefix + full
            if f"{key}.qweight" not in stored and spec.algorithm == "gptq":
                matrices = weight if weight.dim() == 3 else [weight]
                options = (bits, spec.group_size, spec.act_order)
                sums = _hessians(child, full.endswith(".down"), weight, run)
                parts = [quantize_gptq(w, h, *options) for w, h in zip(matrices, sums, strict=True)]
                out = {k: torch.stack([part[k] for part in parts]) for k in parts[0]}
                out = out if weight.dim() == 3 else parts[0]
            elif f"{key}.qweight" not in stored:
                out = quantize_rtn(weight, bits, spec.group_size)
            else:
                out = {k: stored[f"{key}.{k}"] for k in ("qweight", "scales")}
            stored |= {f"{key}.{k}": v.cpu() for k, v in out.items()}
            restored = QuantLinear(out).dequantize().to(weight.device)
            errors[key] = relative_error(weight, restored)
            weight.copy_(restored)
    for name, tensor in module.named_parameters():
        if f"{prefix}{name.removesuffix('.weight')}.qweight" not in stored:
            tensor.copy_(stored.setdefault(prefix + name, tensor.to("cpu", half, copy=True)))
    return errors


def _hessians(child: nn.Module, down: bool, weight: Tensor, run: Callable[[], None]) -> list[Tensor]:
    """Sum of x x^T over the calibration inputs of a linear, or of each expert's `gate_up` or `down`."""
    K, experts = weight.shape[-1], weight.shape[0] if weight.dim() == 3 else 1
    sums = [torch.zeros(K, K, device=weight.device) for _ in range(experts)]

    def add(_, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
        index = child.route(x)[1] if isinstance(child, Experts) else None
        for e, total in enumerate(sums):
            rows = x if index is None else x[(index == e).any(-1)]
            if index is not None and down:
                gate, up = (rows @ child.gate_up[e].T).chunk(2, -1)
                rows = F.silu(gate) * up
            total.addmm_(rows.T, rows)

    handle = child.register_forward_pre_hook(add)
    try:
        run()
    finally:
        handle.remove()
    return sums


def _through(forward: Callable[[Tensor], Tensor], states: Tensor, device, keep: bool = True) -> None:
    """states [W, T, H] on the host -> forward(states), in place, a batch at a time; keep = False throws it away."""
    for i in range(0, len(states), BATCH):
        out = forward(states[i : i + BATCH].to(device))
        if keep:
            states[i : i + BATCH] = out.cpu()


class _Source:
    """An unquantized model directory, read one parameter of ours at a time; `model` stays on the meta device."""

    def __init__(self, directory: Path):

        config_file, self.directory, self.files = directory / "config.json", directory, None
        self.raw = read_json(config_file) if config_file.exists() else None
        if done := [key for key in ("eaglet_quant", "quantization_config") if (self.raw or {}).get(key)]:
            raise UsageError(
                f"{directory} is already quantized ({done[0]} in config.json); use the original."
            )
        self.open()
        self.raw = self.raw or config_to_hf(self.config)  # Meta's format has no config.json
        self.model = build_model(self.config)
        self.names, views = parameter_sources(self.model, self.entries)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        shapes = {name: tuple(view.shape) for name, view in views.items()}
        check_entries(shapes, self.entries, str(directory))
        dtype = self.entries[self.names["embed_tokens.weight"][0]].dtype
        self.half = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16

    def open(self) -> None:
        """Map the files (anew: pages that were read stop counting as memory of this process)."""

        self.config, self.entries = open_model(self.directory)
        self.tied = self.config.tie_word_embeddings
        if self.tied:
            self.entries.pop("lm_head.weight", None)
        stats = [(self.directory / file).stat() for file in sorted({e.file for e in self.entries.values()})]
        found = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
        if self.files not in (None, found):
            raise ValueError(f"{self.directory}: the weights changed while they were read. Start again.")
        self.files = found

    def read(self, name: str, device) -> Tensor:

        tensor = torch.cat([self.entries[hf].read() for hf in self.names[name]]).view(self.shapes[name])
        check_finite(tensor, name, str(self.directory))
        return tensor.to(device, torch.float32)


@torch.no_grad()
def quantize_checkpoint(
    directory: str | Path,
    out: str | Path,
    spec: QuantSpec,
    calibration: Tensor,
    evaluation: Tensor,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    refuse_kl: float | None = None,
    finish: Callable[[Path], dict[str, Any]] = lambda unfinished: {},
) -> dict[str, Any]:
    """Quantize a model directory layer by layer into the directory `out`; returns its receipt.

    One layer is in memory (in fp32) beside the activations of the texts. These pass through the float and the quantized
    layers side by side, so quality is measured without ever holding a model. Finished layers wait in OUT.partial: after
    an interruption the same call goes on from there (a note on the exception says so). `out` appears complete or not at
    all; of a run that would end the same way again nothing is left.

    Args:
        calibration: int64 [W, T], what GPTQ sees; evaluation: int64 [W, T + 1], what the receipt measures.
        refuse_kl: highest mean KL (nats) that is written; ABSURD_KL holds in any case.
        finish: called with the finished but not yet renamed directory; adds to it and to the receipt.
    """

    out, started, source = Path(out), time.time(), _Source(Path(directory))
    apply_spec_(copy.deepcopy(source.model), spec)  # refuses groups that do not fit before any work
    model, gptq, errors, stored, accepted = source.model, spec.algorithm == "gptq", {}, {}, False
    work = _partial(out, [asdict(spec), source.raw, source.files, _digest(calibration)])

    def step(unit: str, module: nn.Module, prefix: str, forward: Callable[[Tensor], Tensor]) -> None:
        """Quantize `module`, or take over what an interrupted run has stored of it."""
        path, fed = work / f"{unit}.safetensors", lambda: _through(forward, inputs, device, keep=False)
        known = {k: e.read() for k, e in read_entries([path]).items()} if path.exists() else {}
        errors.update(quantize_module_(module, prefix, spec, known, source.half, fed))
        for name in (n for n, tensor in known.items() if tensor.is_floating_point()):
            check_finite(known[name], name, "result")
        if not path.exists():
            with _one_line(path):
                write_safetensors(path, known)
        stored.update({k: e.read() for k, e in read_entries([path]).items()})  # mapped, not in memory

    try:
        embedding = nn.Embedding(1, 1)
        set_tensor(embedding, "weight", source.read("embed_tokens.weight", device))
        table, inputs = embedding.weight.clone(), calibration[:0]
        before = embedding(evaluation[:, :-1].to(device)).cpu()
        step("embedding", embedding, "embed_tokens.", embedding)
        after, inputs = (embedding(ids.to(device)).cpu() for ids in (evaluation[:, :-1], calibration))
        model.rotary.build(device, max(after.shape[1], inputs.shape[1]))
        for i, block in enumerate(model.layers):
            source.open()
            for name in [name for name, _ in block.named_parameters()]:
                set_tensor(block, name, source.read(f"layers.{i}.{name}", device))

            def forward(x: Tensor, block: nn.Module = block) -> Tensor:
                return block.forward_train(x, *model.rotary(torch.arange(x.shape[1], device=x.device)[None]))

            _through(forward, before, device)
            step(f"layer-{i:04}", block, f"layers.{i}.", forward)
            for states in (after, inputs):
                _through(forward, states, device)
            block.to("meta")
            if progress is not None:
                progress(i + 1, len(model.layers) + 1, f"layer {i}")
        head = nn.Sequential(OrderedDict(norm=model.norm, lm_head=nn.Linear(1, 1, bias=False)))
        set_tensor(head, "norm.weight", source.read("norm.weight", device))
        set_tensor(head, "lm_head.weight", table if source.tied else source.read("lm_head.weight", device))
        plain, tally = copy.deepcopy(head), Tally()
        step("head", head, "", head)
        for row, x, y in zip(evaluation, before, after, strict=True):
            tally.add(plain(x.to(device)).cpu(), head(y.to(device)).cpu(), row[1:])
        if source.tied and spec.lm_head == "fp16":
            del stored["lm_head.weight"]
        quality, limit = tally.report(), min(ABSURD_KL, ABSURD_KL if refuse_kl is None else refuse_kl)
        if not quality["mean_kl"] <= limit:  # NaN too
            change = f"perplexity {quality['perplexity_before']:.3f} -> {quality['perplexity_after']:.3f}"
            why = f"mean KL {quality['mean_kl']:.4f} nats, {change}; the limit is {limit:g}"
            raise ValueError(f"refused: {why}. Nothing was written; try gptq, int8 or smaller groups.")
        accepted = True
        worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
        receipt = {
            "spec": asdict(spec),
            **quality,
            "worst_layers": [{"name": name, "relative_error": error} for name, error in worst],
            "bytes_before": sum(math.prod(e.shape) * e.dtype.itemsize for e in source.entries.values()),
            "bytes_after": sum(t.numel() * t.element_size() for t in stored.values()),
            "evaluation": {"tokens": evaluation[:, 1:].numel(), "sha256": _digest(evaluation)},
            "calibration": {"tokens": calibration.numel(), "sha256": _digest(calibration)} if gptq else None,
            "computed_in": f"float32 on {device}",
        }
        raw = {k: v for k, v in source.raw.items() if k != "dtype"}
        raw["torch_dtype"] = str(source.half).removeprefix("torch.")
        raw["eaglet_quant"] = {"version": VERSION, **asdict(spec)}

        def fill(unfinished: Path) -> None:
            write_safetensors(unfinished / "model.safetensors", stored)
            write_json(unfinished / "config.json", raw)
            files = [source.directory / name for name in COPIED.split()]
            if not (source.directory / "config.json").exists():  # Meta keeps the tokenizer one folder up
                files.insert(0, source.directory.absolute().parent / "tokenizer.model")
            for file in files:
                if file.is_file():
                    shutil.copyfile(file, unfinished / file.name)
            receipt.update(finish(unfinished))
            receipt.update(
                seconds=round(time.time() - started, 1), peak_memory_bytes=peak_memory(torch.device("cpu"))
            )
            write_json(unfinished / "receipt.json", receipt)

        write_directory(out, fill)
    except Exception as error:
        room = isinstance(error.__cause__, OSError) or not isinstance(error, ValueError)  # disk, memory
        if gptq and (room or accepted) and any(work.glob("*.safetensors")):
            error.add_note(f"The finished layers wait in {work}: the same command goes on from there.")
        else:  # cheap to do again, or sure to end like this again
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work)
    if progress is not None:
        progress(1, 1, "")
    return receipt


def _digest(value: Any) -> str:
    data = (
        value.numpy().tobytes() if isinstance(value, Tensor) else json.dumps(value, sort_keys=True).encode()
    )
    return hashlib.sha256(data).hexdigest()


def _partial(out: Path, identity: Any) -> Path:
    """OUT.partial for this very job: one of another job is cleared."""
    work = out.with_name(out.name + ".partial")
    with _one_line(work):
        if not (work / _digest(identity)).exists():
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            (work / _digest(identity)).touch()
    return work


def write_directory(out: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary directory and rename it to `out`: it appears whole or not at all; an older one stays till then."""
    unfinished, old = (out.with_name(f"{out.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        with _one_line(out):
            unfinished.mkdir(parents=True)
            fill(unfinished)
            if out.exists():
                os.replace(out, old)
            os.replace(unfinished, out)
    except BaseException:
        if old.exists():
            os.replace(old, out)
        raise
    finally:
        for rest in (unfinished, old):
            shutil.rmtree(rest, ignore_errors=True)


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror or error}). Free space or choose another --out; nothing "
            "half-written was left."
        ) from error
