"""A row of a decoding step has the same kernels, tilings, splits and norms whatever the number of rows, on a GPU.

Nothing runs here. The launches of steps on fake CUDA tensors are recorded and compared. That equal launches give equal
bits is for a device to show (tests/test_kernels_gpu.py, tests/test_engine_gpu.py).
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fake_cuda import Indexing, Launches, OneDevice, fake_gpu

import kernels
from bench.random_models import SHAPES, random_model
from decoding import step
from decoding.params import SamplingParams
from engine.engine import Engine, EngineConfig
from engine.load import open_backend
from engine.prefill import CHUNKS, WIDE_CHUNKS
from kernels.panels import panels_bytes
from loading.options import LoadOptions
from model import RMSNorm, Transformer, chain_ancestors
from tree import MAX_NODES
from weights.gguf_types import FORMATS
from weights.quantized import FloatLinear, TiedEmbedding, replace_module

pytestmark = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")
# (sequences, nodes of each): 1 to 1,024 rows, on both sides of every number that ever chose a kernel
ROWS = (
    (1, 1), (1, 2), (2, 1), (1, 8), (1, 9), (1, 17), (2, 26), (1, 64), (1, 65), (1, 129), (8, 17), (1, 256), (8, 60),
    (4, 256),
)  # fmt: skip
FEW = ROWS[::3] + ROWS[-1:]  # for most kinds of weights: whatever number chooses a kernel, there are rows on both sides
# What may differ: how many tokens a program multiplies or looks at, what the compiler does with that many, and who
# sorts integers. Of a product only the split decides how it is added up, of attention the tile and the warps do, too.
FREE = {"BT", "CHAIN", "SHARED", "num_stages", "maxnreg", "SORT"}
FREE_OF = {"linear_kernel": FREE | {"BN", "num_warps", "SERIAL"}}
# Operators of torch that move values or work on one element at a time. A step has no other ones.
HARMLESS = {"aten::" + name for name in """embedding clone contiguous cat sub add mul div exp to _to_copy reciprocal neg
    gt bitwise_and gelu""".split()}  # fmt: skip
# Where layers are recurrent, rows are moved besides, and `kernels.depth_first` counts and sorts integers.
HARMLESS_WALK = {"aten::" + name for name in """ge gather scalar_tensor stack where ne sort sum eq copy_ arange amax
    lt""".split()}  # fmt: skip
GEMMA4 = dict(head_dim=256, full_heads=(2, 512), keys_as_values=True, shared_layers=2, token_inputs=256)
GEMMA4 |= dict.fromkeys(("qk_norm", "value_norm", "layer_scale"), True)
GEMMA4 |= dict(windows=(0, 64) * 2, norms="both", num_hidden_layers=4, activation="gelu_tanh")
SMOL = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
OWN_NORM, OWN_PRODUCT = RMSNorm.forward, kernels.packed_linear


def of_a_file(model: Transformer) -> Transformer:
    """The model with the weights of SmolLM2's file: Q4_1, and Q8_0 for a tied LM head."""
    for name, module in list(model.named_modules()):
        if isinstance(module, FloatLinear):
            n, k, bits = module.out_features, module.in_features, 8 if name == "lm_head" else 4
            form = FORMATS["Q8_0" if name == "lm_head" else "Q4_1"]
            weight = torch.empty(panels_bytes(form, n, k) // 4, dtype=torch.int32, device="cuda")
            counters = torch.empty(n, dtype=torch.int32, device="cuda")
            how = dict(counters=counters, config=kernels.linear_config(n, k, bits), forms=((n, *form.numbers()),))
            replace_module(model, name, FloatLinear(kernels.PackedWeight("planes", bits, 0, n, k, weight, **how)))
    model.embed_tokens = TiedEmbedding(model.lm_head, model.dtype)
    return model


def target(kind: str) -> Transformer:
    """Two layers on the fake GPU: a shape, and how its weights are kept."""
    shape, quant = kind.split()
    config = replace(SHAPES.get(shape, SHAPES["llama-3-8b"]), num_hidden_layers=2, windows=(0, 64))
    config = replace(config, **GEMMA4) if shape == "gemma4" else config
    if shape == "smollm2":
        config = replace(config, vocab_size=49152, tie_word_embeddings=True, **SMOL)
    if config.delta is not None:
        config = replace(config, recurrent=(0,), windows=(0, 0), mtp=False)
    if quant == "shared":
        config = replace(config, shared_intermediate_size=512)
    dtype = torch.float16 if quant == "int4" else torch.bfloat16
    model = random_model(config, quant if quant.startswith("int") else None, torch.device("cuda"), dtype)
    return of_a_file(model) if quant == "file" else model


def same(launches: Launches) -> Iterator[tuple]:
    """What decides the bits of a row in each launch. A launch that continues the rows of the one before counts once."""
    before = None
    for kernel, arguments, options in launches.launches:
        moves = "kernels.draft", "kernels.commit", "kernels.kv"
        if kernel.fn.__module__ in moves or kernel.__name__ == "sort_pairs_kernel":
            continue  # they move integers, and rows of the cache
        constants = {p.name for p in kernel.params if p.is_constexpr}
        chosen = {k: v for k, v in arguments.items() if k in constants} | options
        weight = arguments["w"].untyped_storage()._cdata if "w" in arguments else 0
        free = FREE_OF.get(kernel.__name__, FREE)
        found = kernel.__name__, weight, sorted((k, str(v)) for k, v in chosen.items() if k not in free)
        if found != before:
            yield found
        before = found


def recorded(engine: Engine, nodes: int, params: SamplingParams) -> list[tuple]:
    """The launches of one step of plain decoding whose forward has so many nodes in each sequence."""
    twin = engine.twin(nodes)
    twin.pin(128)
    count = Launches()
    with torch.no_grad(), engine.backend.active(), OneDevice(), count:
        step.decode_step(engine.model, twin.drafter, twin.state, params.mode)
    harmless = HARMLESS | HARMLESS_WALK if engine.model.config.recurrent else HARMLESS
    strange = {name for _, name in count.counts if "::" in name} - harmless
    assert not strange, f"operators of torch that may add up in another order: {strange}"
    return list(same(count))


def launched_by_width(kind: str, rows: tuple[tuple[int, int], ...] = FEW) -> list[list[tuple]]:
    """`recorded` for these numbers of rows."""
    backend, found = open_backend(LoadOptions(device="cuda"), lambda note: None), []
    with torch.no_grad(), backend.active():
        model = target(kind)
    for sequences, nodes in rows:
        config = EngineConfig(batch_size=sequences, ctx=512, backend=backend)
        found.append(recorded(Engine(model, config=config), nodes, SamplingParams(temperature=1.0, top_p=0.9)))
    return found


@pytest.mark.parametrize("kind", [
    "llama-3-8b half", "llama-3-8b int4", "llama-3-8b int8", "smollm2 file", "smollm2 half", "mixtral-8x7b int4",
    "mixtral-8x7b shared", "qwen3.5-9b half", "qwen3.5-9b int4", "gemma4 half", "gemma4 int4",
])  # fmt: skip
def test_a_row_has_the_same_kernels_in_every_step(monkeypatch, kind):
    """A product that goes to cuBLAS, a norm that few rows get in another kernel, another
    split or tiling, heads that are turned elsewhere, attention that adds up otherwise for a large tree, and any operator
    of torch that reduces. With a drafter, or among others, a text would then differ from plain decoding."""
    rows = ROWS if kind == "llama-3-8b int4" else FEW
    with fake_gpu(monkeypatch):
        found = launched_by_width(kind, rows)
    assert all(launches == found[0] for launches in found), rows[[one == found[0] for one in found].index(False)]
    norms = 22 if kind.startswith("gemma4") else 5
    assert sum(name == "rms_norm_kernel" for name, *_ in found[0]) == norms and found[0][-1][0] == "choose_kernel"


def few_rows_elsewhere(norm, x):
    """A norm that few rows get from another kernel."""
    rows = x.reshape(-1, 1, x.shape[-1])
    few = len(rows) <= 8
    return kernels.experts.mix(rows, rows[:, :, 0].contiguous(), None).view(x.shape) if few else OWN_NORM(norm, x)


def many_rows_elsewhere(x, weight, *rest, **more):
    """A product for which torch multiplies where there are many rows."""
    if x.shape[:-1].numel() > 64:
        x @ x.mT
    return OWN_PRODUCT(x, weight, *rest, **more)


@pytest.mark.parametrize("name,value", [
    ("kernels.packed_linear", many_rows_elsewhere), ("model.RMSNorm.forward", few_rows_elsewhere),
])  # fmt: skip
def test_a_kernel_that_depends_on_the_width_is_found(monkeypatch, name, value):
    """A comparison that passes whatever the launches are."""
    monkeypatch.setattr(name, value)
    with fake_gpu(monkeypatch):
        try:
            found = launched_by_width("llama-3-8b int4")
        except AssertionError as error:
            assert value is many_rows_elsewhere and "aten::bmm" in str(error)
        else:
            assert value is few_rows_elsewhere and any(launches != found[0] for launches in found)


def test_a_row_of_a_prompt_has_the_same_kernels_in_every_chunk_and_in_a_step(monkeypatch):
    """A prompt of which a cache still holds a part, as it was read or as it was decoded: the keys and values would have
    other bits than those of the whole prompt. Chunks and trees must also be narrow enough for our kernels. Heads are
    turned in a launch of their own in wide chunks."""
    assert max(WIDE_CHUNKS) <= kernels.SMALL_M >= MAX_NODES
    with fake_gpu(monkeypatch):
        backend, found = open_backend(LoadOptions(device="cuda"), lambda note: None), []
        with torch.no_grad(), backend.active():
            model = target("llama-3-8b int4")
            cache = model.new_cache(1, 2048)
            for width in (1, *CHUNKS, *WIDE_CHUNKS):
                count, at = Launches(), torch.zeros(1, dtype=torch.int64, device="cuda")
                tokens, depth = (torch.zeros(1, width, dtype=torch.int64, device="cuda") for _ in range(2))
                seen = chain_ancestors(1, width, "cuda").contiguous()
                with OneDevice(), Indexing(), count:
                    model(tokens, model.nodes(at, depth, seen, 2048, chain=width > 1), cache)
                assert {name for _, name in count.counts if "::" in name} <= HARMLESS
                found.append(list(same(count)))
    assert all(launches == found[0] for launches in found[: -len(WIDE_CHUNKS)])
    turned = {"HQ", "HKV", "HD", "LEVELS", "POOLED", "QK_NORM", "INT8"}  # of heads behind a product
    steps = [[(*what, [c for c in chosen if c[0] not in turned]) for *what, chosen in launches] for launches in found]
    wide = [[launch for launch in launches if launch[0] != "rope_kernel"] for launches in steps]
    assert all(launches == steps[0] for launches in wide)
