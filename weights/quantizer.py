"""Quantizing a model directory layer by layer, with memory for one layer.

One layer is in memory (in fp32) beside the activations of the texts. The activations pass through the float layers and
through the quantized ones, so quality is measured without ever holding a model. GPTQ's calibration sees what the
quantized layers before produce. Finished layers wait in OUT.partial until the result is complete.
"""

import contextlib
import copy
import math
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

import kernels
from layers.gemma4 import Gemma4Transformer
from layers.recurrent import RecurrentTransformer
from support import cache
from support.errors import UsageError
from support.files import directory_written_whole, write_json, writing_errors
from support.machine import peak_memory
from weights.checkpoint import QUANTIZED, Checkpoint
from weights.files import Progress, check_finite, read_entries, write_safetensors
from weights.hf import build_model, checked_sources, config_to_hf, read_parameter, without_copy
from weights.quantized import QuantLinear, QuantSpec, apply_spec_, digest, quantizable, set_tensor, spec_to_json
from weights.rounding import Reached, Tally, half_of, relative_error, round_weight

ABSURD_KL = 2.0  # nats per token; past this the result is broken, not merely bad, and is never written
Forward = Callable[[Tensor], Tensor]  # hidden states [W, T, H] -> hidden states
BATCH = 4  # sequences that pass through a layer together


class Windows(NamedTuple):
    """The text that a quantization reads, as token ids in windows of T tokens."""

    calibration: Tensor  # int64 [W, T], what GPTQ sees; none for RTN
    evaluation: Tensor  # int64 [W, T + 1], what the receipt measures


@torch.no_grad()
def quantize_checkpoint(
    directory: str | Path,
    out: str | Path,
    spec: QuantSpec,
    windows: Windows,
    device: torch.device | str = "cpu",
    progress: Progress = lambda *_: None,
    refuse_kl: float | None = None,
    finish: Callable[[Path], dict[str, Any]] = lambda unfinished: {},
) -> dict[str, Any]:
    """Quantize a model directory layer by layer into the directory `out`.

    `out` appears complete or not at all. After an interruption the same call goes on from the finished layers, and a
    note on the exception says so. A run that would fail again deletes its partial files.

    Args:
        progress: called with (layers done, layers in total, name) after each layer.
        refuse_kl: highest mean KL (nats) that is written. ABSURD_KL holds in any case.
        finish: called with the finished but not yet renamed directory. It may add files, and returns additions to the
            receipt.

    Returns:
        The receipt: the spec, what quantizing cost in quality, and sizes.

    Raises:
        UsageError: the model is quantized already, or a group size does not fit.
        ValueError: one line, for a bad model directory, a full disk, or a result past `refuse_kl`.
    """
    out, started, source = Path(out), time.time(), _Source(Path(directory))
    apply_spec_(copy.deepcopy(source.model), spec)  # refuses groups that do not fit before any work
    work = _partial(out, [asdict(spec), source.raw, source.files, digest(windows.calibration)])
    run, good = _Run(source, spec, work, device), False
    try:
        quality = run.quantize(windows, progress)
        _refuse_bad(quality, ABSURD_KL if refuse_kl is None else min(ABSURD_KL, refuse_kl))
        good = True
        receipt = quality | run.receipt(windows)
        with directory_written_whole(out) as unfinished:
            run.write(unfinished)
            receipt |= finish(unfinished)
            receipt["seconds"] = round(time.time() - started, 1)
            receipt["peak_memory_bytes"] = peak_memory(torch.device("cpu"))
            write_json(unfinished / "receipt.json", receipt)
    except Exception as error:
        # The disk or the memory was full, and may have room next time. Other errors would come again.
        room = isinstance(error.__cause__, OSError) or not isinstance(error, ValueError)
        if spec.algorithm == "gptq" and (room or good) and any(work.glob("*.safetensors")):
            error.add_note(f"The finished layers wait in {work}: the same command goes on from there.")
        else:
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work)
    progress(1, 1, "")
    return receipt


class _Source:
    """A float model directory, read one of our parameters at a time. `model` stays on the meta device."""

    def __init__(self, directory: Path):
        self.checkpoint = Checkpoint.open(directory)
        if self.checkpoint.has_mtp:
            self.checkpoint = self.checkpoint.with_mtp
        if key := QUANTIZED.get(self.checkpoint.kind):
            raise UsageError(f"{directory} is already quantized ({key} in config.json); use the original.")
        config = self.checkpoint.config
        self.raw = self.checkpoint.raw or config_to_hf(config)  # Meta's format has no config.json
        self.tied = config.tie_word_embeddings
        self.model = build_model(config)
        self.files: list[list[int]] | None = None
        self.open()
        without_copy(self.model, self.checkpoint.entries, str(directory))  # raises if a second LM head differs
        self.names = checked_sources(self.model, self.entries, str(directory))
        self.half = half_of(self.entries[self.names["embed_tokens.weight"][0]].dtype)

    def open(self) -> None:
        """Map the files, anew if they are mapped already. Pages that were read then stop counting as our memory."""
        self.checkpoint = replace(self.checkpoint)  # a copy without entries
        self.entries = dict(self.checkpoint.entries)
        if self.tied:
            self.entries.pop("lm_head.weight", None)
        names = sorted({entry.file for entry in self.entries.values()})
        stats = [(self.checkpoint.directory / name).stat() for name in names]
        files = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
        if self.files not in (None, files):
            raise ValueError(f"{self.checkpoint.directory}: the weights changed while they were read. Start again.")
        self.files = files

    def read(self, name: str, device: torch.device | str) -> Tensor:
        """One of our parameters, in fp32."""
        where = str(self.checkpoint.directory)
        shape = self.model.get_parameter(name).shape
        return read_parameter(self.entries, self.names[name], shape, where, device, torch.float32)


class _Run:
    """One pass through the layers: what is quantized so far, and the activations that enter the next layer."""

    def __init__(self, source: _Source, spec: QuantSpec, work: Path, device: torch.device | str):
        self.source = source
        self.spec = spec
        self.work = work
        self.device = device
        config, carries = source.model.config, isinstance(source.model, Gemma4Transformer)
        self.sizes = (config.hidden_size, config.carried) if carries else (config.hidden_size,)  # of what goes on
        self.errors: dict[str, float] = {}  # relative weight errors by name
        self.stored: dict[str, Tensor] = {}  # the tensors of the result, mapped from the files in `work`

    def quantize(self, windows: Windows, progress: Progress) -> dict[str, Any]:
        """Quantize the whole model. Returns its quality (`Tally.report`), also with rounded activations."""
        model = self.source.model
        self._embed(windows.calibration, windows.evaluation[:, :-1])
        model.rotary.build(self.device, max(self.after.shape[1], self.inputs.shape[1]))
        for i in range(len(model.layers)):
            self._layer(i)
            progress(i + 1, len(model.layers) + 1, f"layer {i}")
        if isinstance(model, RecurrentTransformer) and model.mtp is not None:
            self._mtp(model.mtp)
        return self._head(windows.evaluation[:, 1:])

    def _embed(self, calibration: Tensor, evaluation: Tensor) -> None:
        """Make the first activations."""
        model = self.source.model
        own = model.token_inputs if isinstance(model, Gemma4Transformer) else None
        set_tensor(model, "embed_tokens.weight", self.source.read("embed_tokens.weight", self.device))
        for name in [name for name, _ in own.named_parameters()] if own else ():
            set_tensor(own, name, self.source.read(f"token_inputs.{name}", self.device))
        self.before = self._embedded(evaluation)  # of the float layers
        self._unit("embedding", model.embed_tokens, "embed_tokens.", model.embed)
        if own is not None:
            self.inputs = model.embed(calibration.to(self.device)).cpu()
            self._unit("token-inputs", own, "token_inputs.", own.projection)
        self.after, self.inputs = self._embedded(evaluation), self._embedded(calibration)  # of the quantized layers
        self.rounded = self.after.clone()  # of the quantized layers, with activations as the CPU kernels round them
        model.embed_tokens.to("meta")

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings of tokens [W, T], and beside them what layers need of other layers (`Transformer.carry`)."""
        model, states = self.source.model, []
        for rows in tokens.to(self.device).split(BATCH):
            x = model.embed(rows)
            states.append(torch.cat((x, *model.carry(rows, x)), -1).cpu())
        return torch.cat(states)

    def _layer(self, i: int) -> None:
        """Quantize layer i and carry all activations through it."""
        model = self.source.model
        block = model.layers[i]
        self.source.open()
        for name in [name for name, _ in block.named_parameters()]:
            set_tensor(block, name, self.source.read(f"layers.{i}.{name}", self.device))

        def attend(states: Tensor) -> Tensor:
            x, *carried = states.split(self.sizes, -1)
            x = block.attend(x, *model.rotary(torch.arange(x.shape[1], device=x.device)[None]), *carried)
            return torch.cat((x, *carried), -1)

        def feed_forward(states: Tensor) -> Tensor:
            x, *carried = states.split(self.sizes, -1)
            return torch.cat((block.feed_forward(x, *carried), *carried), -1)

        def forward(states: Tensor) -> Tensor:
            return feed_forward(attend(states))

        self._through(forward, self.before)
        self._unit(f"layer-{i:04}", block, f"layers.{i}.", feed_forward, attend)
        self._through(forward, self.after)
        with rounded_activations(block, self.spec):
            self._through(forward, self.rounded)
        self._through(feed_forward, self.inputs)
        block.to("meta")

    def _mtp(self, layer: nn.Module) -> None:
        """Round the layer that drafts to the nearest levels, whatever the algorithm: it cannot change a token."""
        for name in [name for name, _ in layer.named_parameters()]:
            set_tensor(layer, name, self.source.read(f"mtp.{name}", self.device))
        self._unit("mtp", layer, "mtp.", layer, spec=replace(self.spec, algorithm="rtn", act_order=False))
        layer.to("meta")

    def _head(self, targets: Tensor) -> dict[str, Any]:
        """Quantize the LM head and compare the logits of the models."""
        source, device, tally, rounded = self.source, self.device, Tally(), Tally()
        head = nn.Sequential(OrderedDict(norm=source.model.norm, lm_head=nn.Linear(1, 1, bias=False)))
        matrix = "embed_tokens.weight" if source.tied else "lm_head.weight"
        set_tensor(head, "norm.weight", source.read("norm.weight", device))
        set_tensor(head, "lm_head.weight", source.read(matrix, device))
        plain = copy.deepcopy(head)
        kept = self.before, self.after, self.rounded, self.inputs
        self.before, self.after, self.rounded, self.inputs = (t[..., : source.model.config.hidden_size] for t in kept)
        self._unit("head", head, "", head)

        def logits(module: nn.Module, x: Tensor) -> Tensor:
            return source.model.scaled(module(x.to(device))).cpu()

        for ids, x, y, z in zip(targets, self.before, self.after, self.rounded, strict=True):
            before = logits(plain, x)
            tally.add(before, logits(head, y), ids)
            with rounded_activations(head, self.spec):
                rounded.add(before, logits(head, z), ids)
        if source.tied and self.spec.lm_head == "fp16":
            del self.stored["lm_head.weight"]
        return tally.report() | {"rounded_activations": rounded.report()}

    def _unit(
        self, unit: str, module: nn.Module, prefix: str, forward: Forward, first: Forward | None = None,
        spec: QuantSpec | None = None,
    ) -> None:  # fmt: skip
        """Quantize `module`, or take over what an interrupted run has stored of it. spec: instead of that of the run.

        Its linears are rounded one after the other, and each sees what its rounded predecessors produce. The module is
        left with the weights that the stored tensors stand for.

        first: what runs before `forward`, with all linears of `module.attention`. `self.inputs` have gone through it
            afterwards, so that it runs once for the linears behind it.
        """
        path = self.work / f"{unit}.safetensors"
        spec = spec or self.spec
        finished = cache.sealed(path)  # a file that no longer is what was written is made again
        known = _tensors_in(path) if finished else {}
        rounded = {full for _, weights, _ in quantizable(module, spec) for full in weights}
        for name, tensor in module.named_parameters():
            if name.removesuffix(".weight") not in rounded:
                tensor.copy_(known.setdefault(prefix + name, tensor.to("cpu", self.source.half, copy=True)))
        now = first or forward
        for child, weights, bits in quantizable(module, spec):
            for full, weight in weights.items():
                if now is first and not full.startswith("attention."):
                    self._through(first, self.inputs)
                    now = forward
                key = prefix + full
                if f"{key}.qweight" in known:
                    out = {leaf: known[f"{key}.{leaf}"] for leaf in ("qweight", "scales")}
                else:
                    feed = partial(self._through, now, self.inputs, keep=False)
                    out = round_weight(child, full, weight, bits, spec, feed, stop=True)
                    known |= {f"{key}.{leaf}": tensor.cpu() for leaf, tensor in out.items()}
                restored = QuantLinear(out).dequantize().to(weight.device)
                self.errors[key] = relative_error(weight, restored)
                weight.copy_(restored)
        if now is first:
            self._through(now, self.inputs)
        for name, tensor in known.items():
            if tensor.is_floating_point():
                check_finite(tensor, name, "result")
        if not finished:
            with writing_errors(path):
                write_safetensors(path, known)
                cache.seal(path)
        self.stored |= _tensors_in(path)

    def _through(self, forward: Forward, states: Tensor, keep: bool = True) -> None:
        """Replace states [W, T, H] on the host by forward(states), a batch at a time. Without `keep` only run it."""
        for i in range(0, len(states), BATCH):
            with contextlib.nullcontext() if keep else contextlib.suppress(Reached):
                out = forward(states[i : i + BATCH].to(self.device))
            if keep:
                states[i : i + BATCH] = out.cpu()

    def receipt(self, windows: Windows) -> dict[str, Any]:
        """What the receipt says of weights, sizes and texts."""
        worst = sorted(self.errors.items(), key=lambda item: -item[1])[:5]
        entries, gptq = self.source.entries.values(), self.spec.algorithm == "gptq"
        calibration, evaluation = windows
        return {
            "spec": asdict(self.spec),
            "worst_layers": [{"name": name, "relative_error": error} for name, error in worst],
            "bytes_before": sum(math.prod(e.shape) * e.dtype.itemsize for e in entries),
            "bytes_after": sum(t.nbytes for t in self.stored.values()),
            "evaluation": {"tokens": evaluation[:, 1:].numel(), "sha256": digest(evaluation)},
            "calibration": {"tokens": calibration.numel(), "sha256": digest(calibration)} if gptq else None,
            "computed_in": f"float32 on {self.device}",
        }

    def write(self, directory: Path) -> None:
        """Write the result in our format (`weights.stored`) with the tokenizer's files beside it."""
        raw = {k: v for k, v in self.source.raw.items() if k not in ("dtype", "quantization_config")}
        raw["torch_dtype"] = str(self.source.half).removeprefix("torch.")
        write_safetensors(directory / "model.safetensors", self.stored)
        write_json(directory / "config.json", raw | {"eaglet_quant": spec_to_json(self.spec)})
        self.source.checkpoint.copy_texts(directory)


@contextlib.contextmanager
def rounded_activations(module: nn.Module, spec: QuantSpec) -> Iterator[None]:
    """Inside the block, what `spec` quantizes sees its inputs as the CPU kernels round them: to int8, one scale per 32
    columns. Experts do not, because those kernels have none."""

    def round_(linear: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        blocks = inputs[0].unflatten(-1, (-1, kernels.CPU_BLOCK))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return ((blocks / scale).round() * scale).flatten(-2)

    linears = (child for child, _, _ in quantizable(module, spec) if isinstance(child, nn.Linear))
    fitting = [linear for linear in linears if kernels.cpu_fits(*linear.weight.shape, 0)]
    hooks = [linear.register_forward_pre_hook(round_) for linear in fitting]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_bad(quality: dict[str, Any], limit: float) -> None:
    """Raise a ValueError for a result past the limit (nats)."""
    if not quality["mean_kl"] <= limit:  # NaN too
        change = f"perplexity {quality['perplexity_before']:.3f} -> {quality['perplexity_after']:.3f}"
        why = f"mean KL {quality['mean_kl']:.4f} nats, {change}; the limit is {limit:g}"
        raise ValueError(f"refused: {why}. Nothing was written; GPTQ, int8 and smaller groups come nearer.")


def _tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. They are mapped, so they take no memory until they are used."""
    return {name: entry.read() for name, entry in read_entries([path]).items()}


def _partial(out: Path, identity: Any) -> Path:
    """OUT.partial for the finished layers of this very job. What another job left there is deleted."""
    work = out.with_name(out.name + ".partial")
    with writing_errors(work):
        if not (work / digest(identity)).exists():
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            (work / digest(identity)).touch()
    return work
