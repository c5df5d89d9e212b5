"""The model equals transformers for every family, and a tree forward equals the forwards of its paths."""

import functools
import random
from collections.abc import Sequence

import pytest
import torch
from conftest import BASE, FAMILIES, build_hf
from tiny import geometry, load_model, one_line

import kernels
from engine.fused import fused_parts
from families.config import ROPE_TYPES, ModelConfig
from kernels.memory import commit_text
from kernels.records import Memory
from layers.build import build_transformer
from loading.options import LoadOptions
from model import Transformer, chain_ancestors
from weights.checkpoint import Checkpoint
from weights.quantized import pack_

LENGTH = 40


@pytest.fixture(scope="module")
def pair(tiny_checkpoint):
    """pair(family, dtype) -> (transformers model, ours) with the same weights."""

    @functools.cache
    def make(family: str, dtype: torch.dtype = torch.float32):
        ours = load_model(tiny_checkpoint(family), dtype=dtype)
        if ours.config.rope.kind == "longrope":
            ours.rotary.build("cpu", 80)  # its original length, as a context of that length does
        return build_hf(family).to(dtype), ours

    return make


def tokens_of(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=generator)


def feed(
    model: Transformer, cache: Sequence[torch.Tensor], tokens: torch.Tensor, n: int, rows: int | None = None, taps=(),
    layers=None, memory: Memory | None = None,
):  # fmt: skip
    """Feeds one chunk at n as a chain, padded to `rows` rows. Returns hidden states of the real rows, and taps. memory:
    of recurrent layers, which takes the real rows."""
    B, T = tokens.shape
    rows = rows or T
    padded = torch.cat((tokens, tokens.new_zeros(B, rows - T)), 1)
    depth = torch.arange(rows).expand(B, -1)
    where = torch.full((B,), n), depth, chain_ancestors(B, rows, "cpu"), cache[0].shape[4]
    memory = memory and memory._replace(keep=torch.full((B,), T))
    nodes = model.nodes(*where, chain=memory is not None)
    hidden, tapped = model(padded, nodes, cache, taps, layers, memory)
    if memory is not None:
        commit_text(memory, model.config.delta.kernel - 1)
    return hidden[:, :T], None if tapped is None else tapped[:, :T]


def run(model: Transformer, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """Logits of a whole prompt fed in fixed chunks, the last one padded."""
    length = tokens.shape[1]
    cache, memory = model.new_cache(tokens.shape[0], length + chunk + 1), model.new_memory(tokens.shape[0])
    parts = ((i, tokens[:, i : i + chunk]) for i in range(0, length, chunk))
    out = [feed(model, cache, part, i, chunk, memory=memory)[0] for i, part in parts]
    return model.logits(torch.cat(out, 1))


def random_tree(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(parent [N], ancestors [N, N] incl. self) with parent[i] < i, branching and of some depth."""
    generator = torch.Generator().manual_seed(seed)
    parent = torch.tensor([0] + [int(torch.randint(max(0, i - 4), i, (), generator=generator)) for i in range(1, size)])
    ancestors = torch.eye(size, dtype=torch.bool)
    for i in range(1, size):
        ancestors[i] |= ancestors[parent[i]]
    return parent, ancestors


@pytest.mark.parametrize("experts", [0, 4])
def test_the_model_of_the_card_needs_no_other_file(experts):
    """Catches a LLaMA or Mixtral that model.py alone no longer makes, and two facts of which one is forgotten."""
    plain = geometry(num_local_experts=experts, num_experts_per_tok=2)
    shapes = [{k: v.shape for k, v in make(plain).state_dict().items()} for make in (Transformer, build_transformer)]
    assert shapes[0] == shapes[1]
    one_line(lambda: build_transformer(geometry(sinks=True, output_gate=True)), "ShapedAttention and GatedAttention")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(pair, family):
    """Catches a wrong norm, bias, head order, RoPE type, window, router or tie, and leaks at chunk borders.

    Chunks of one token are those of `test_greedy_tokens_equal_transformers`.
    """
    hf, ours = pair(family)
    tokens = tokens_of(LENGTH, batch=2)
    want = hf(tokens).logits
    assert 0.3 < want.std() < 4
    for chunk in (LENGTH, 7):
        assert (run(ours, tokens, chunk) - want).abs().max() < 1e-4, chunk


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["reference", "cpu"])
def test_greedy_tokens_equal_transformers(pair, tiny_checkpoint, family, mode):
    """Catches errors too small for one forward that add up over the cache, such as keys stored before their rotation,
    and a fact that the C++ kernels, which know float32 alone, act upon in another way.

    transformers reads prompts and tokens at once: its greedy tokens are ours if each has its highest logit.
    """
    if mode == "cpu" and kernels.cpu_problem():
        pytest.skip("the CPU kernels do not run here")
    hf, ours = pair(family) if mode == "cpu" else pair(family, torch.float64)
    prompts, found, logits = tokens_of(9, seed=1, batch=3), [], []
    if mode == "cpu":
        ours = load_model(tiny_checkpoint(family), dtype=torch.float32)
        ours.rotary.build("cpu", 80)
    layers = fused_parts().layers if mode == "cpu" else None
    with kernels.KernelBackend(mode, "cpu").active(), torch.inference_mode():
        if mode == "cpu":
            pack_(ours, torch.float32)
        cache, memory, tokens = ours.new_cache(3, 64), ours.new_memory(3), prompts
        for _ in range(24):
            hidden, _ = feed(ours, cache, tokens, 9 + len(found) - tokens.shape[1], layers=layers, memory=memory)
            logits.append(ours.logits(hidden[:, -1]))
            tokens = logits[-1].argmax(-1, keepdim=True)
            found.append(tokens)
    want = hf(torch.cat((prompts, *found[:-1]), 1)).logits[:, 8:]
    assert torch.equal(want.argmax(-1), torch.cat(found, 1))
    # transformers computes recurrent layers in float32 and in another order, and their roundings add up along the text
    assert (torch.stack(logits, 1) - want).abs().max() < (1e-3 if ours.config.recurrent else 1e-4)


@pytest.mark.parametrize("family", ["llama31", "llama-tied", "yarn", "yarn-set", "linear", "codellama"])
def test_long_positions(pair, family):
    """Catches scaled RoPE that is right at the first positions only. The prompt is longer than the original length."""
    hf, ours = pair(family)
    tokens = tokens_of(400, seed=2)
    assert (run(ours, tokens, 128) - hf(tokens).logits).abs().max() < 1e-4


def test_longrope_follows_the_context(pair, tiny_checkpoint):
    """Catches factors of short contexts in long ones. Every context takes those that transformers takes at its end."""
    hf, _ = pair("phi3-long")
    ours = Checkpoint.open(tiny_checkpoint("phi3-long")).load(dtype=torch.float32, max_positions=120)
    tokens = tokens_of(100)
    assert (run(ours, tokens, 64) - hf(tokens).logits).abs().max() < 1e-4
    assert LoadOptions(str(tiny_checkpoint("phi3-long"))).with_defaults(ours.config).ctx == 80


def test_positions_of_dynamic_rope_end_at_the_original_length():
    """Dynamic NTK scaling would change its base under keys that are already cached."""
    raw = {**BASE, "model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert ModelConfig.from_hf(raw).max_positions == 512
    raw["rope_scaling"]["original_max_position_embeddings"] = 100
    config = ModelConfig.from_hf(raw)
    assert config.max_positions == 100
    plain = ModelConfig.from_hf({**raw, "rope_scaling": None})
    assert torch.equal(config.rope.frequencies(16)[0], plain.rope.frequencies(16)[0])


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if "qwen3_5" not in family and family != "qwen3_next"]
)
def test_every_path_of_a_tree_equals_its_plain_forward(pair, family):
    """Catches a node that sees a sibling, misses an ancestor, or has its slot as its position instead of its depth.

    tests/test_recurrent.py has the families whose layers are recurrent.
    """
    _, model = pair(family, torch.float64)
    n, N = 21, 12
    prompt, nodes = tokens_of(n), tokens_of(N, seed=5)
    parent, ancestors = random_tree(N, seed=3)
    cache = model.new_cache(1, 64)
    feed(model, cache, prompt, 0)
    before = [kind.clone() for kind in cache]
    depth = ancestors.sum(-1)[None] - 1
    got, _ = model(nodes, model.nodes(torch.tensor([n]), depth, ancestors[None], 64), cache)
    for node in range(N):
        path = ancestors[node].nonzero().flatten()
        plain = [kind.clone() for kind in before]
        want, _ = feed(model, plain, nodes[:, path], n)
        assert (got[0, path] - want[0]).abs().max() < 1e-10
        # Committing that path leaves the cache as if only that path had been run.
        place, end = torch.arange(len(path)), n + len(path)
        for kind, want in zip(cache, plain, strict=True):
            moved = kind.clone()
            kernels.commit_kv(moved, (n + path)[None], (n + place)[None])
            assert (moved[..., :end, :] - want[..., :end, :]).abs().max() < 1e-10
    assert depth.max() >= 3 and len(set(parent.tolist())) < N - 1


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "hunyuan", "ministral3", "glm4_moe"])
def test_taps_are_the_states_entering_layers(pair, family):
    """Catches EAGLE-3 taps off by one layer, or taken after a norm. Acceptance would drop without any error."""
    hf, ours = pair(family)
    tokens = tokens_of(20)
    states = hf(tokens, output_hidden_states=True).hidden_states
    hidden, taps = feed(ours, ours.new_cache(1, 24), tokens, 0, taps=(0, 1, 2, 3))
    trained_hidden, trained_taps = ours.forward_train(tokens, (0, 1, 2, 3))
    parts = taps.chunk(4, -1)
    for i in range(3):
        assert (parts[i] - states[i]).abs().max() < 1e-4
    assert (ours.norm(parts[3]) - states[3]).abs().max() < 1e-4  # transformers norms its last entry
    assert (hidden - states[3]).abs().max() < 1e-4
    assert (trained_hidden - hidden).abs().max() < 1e-4 and (trained_taps - taps).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "mixtral", "mistral", "gemma2", "gemma4", "gemma4-moe", "gpt_oss"])
def test_a_branch_of_nan_changes_nothing_else(tiny_checkpoint, family):
    """A rejected branch that overflows must not reach its siblings through masked attention or experts (0 x NaN)."""
    model = load_model(tiny_checkpoint(family), dtype=torch.float64)
    n, N, bad = 11, 8, 2
    ancestors = torch.eye(N, dtype=torch.bool)
    ancestors[:, 0] = True
    ancestors[6, 5] = ancestors[7, bad] = True  # node 7 hangs below the bad node
    nodes = tokens_of(N, seed=4)
    nodes[0, bad] = 100
    nodes[nodes == 101] = 99

    def forward() -> torch.Tensor:
        cache = model.new_cache(1, 32)
        feed(model, cache, tokens_of(n), 0)
        depth = ancestors.sum(-1)[None] - 1
        return model(nodes, model.nodes(torch.tensor([n]), depth, ancestors[None], 32), cache)[0][0]

    clean = forward()
    nodes[0, bad] = 101
    model.embed_tokens.weight[101] = float("nan")
    broken = forward()
    keep = [i for i in range(N) if i not in (bad, 7)]
    assert broken[[bad, 7]].isnan().all()
    assert torch.equal(clean[keep], broken[keep])


def test_stale_cache_rows_are_never_read(pair):
    """Catches rows past the live length (old branches, padding) that leak into attention."""
    _, model = pair("llama", torch.float64)
    prompt = tokens_of(10)
    clean, dirty = model.new_cache(1, 40), [torch.full_like(model.new_cache(1, 40)[0], float("nan"))]
    assert torch.equal(feed(model, clean, prompt, 0)[0], feed(model, dirty, prompt, 0)[0])


def test_cost_functions_equal_hand_counts(pair):
    """Catches bandwidth shares that rest on a forgotten matrix, a counted embedding table, or all experts."""
    H, I, V, L, hd = 64, 96, 128, 3, 16
    attention = H * (4 + 2 * 2) * hd + 4 * hd * H
    layer = attention + 3 * H * I + 2 * H
    _, llama = pair("llama")
    assert llama.weight_bytes(5) == 4 * (L * layer + H + V * H + 5 * H)
    _, tied = pair("llama-tied")
    assert tied.weight_bytes(1) == llama.weight_bytes(1)  # a tied LM head is read as well
    _, mixtral = pair("mixtral")
    touched = 4 * (1 - (1 - 2 / 4) ** 3)
    sparse = attention + 2 * H + 4 * H + touched * 3 * H * I
    assert mixtral.weight_bytes(3) == pytest.approx(4 * (L * sparse + H + V * H + 3 * H))
    assert llama.kv_bytes(100) == 100 * L * 2 * 2 * hd * 4
    assert llama.kv_bytes(100, element_size=1) == 100 * L * 2 * 2 * hd
    _, mistral = pair("mistral")
    assert mistral.kv_bytes(100) == 8 * L * 2 * 2 * hd * 4


@pytest.mark.parametrize("family", ["mixtral", "gemma4", "gemma4-moe", "gpt_oss"])
def test_forward_traces_whole_and_is_not_recompiled(pair, family):
    """Catches a data-dependent branch or a guard on a value, which would cost seconds in the middle of a reply."""
    _, model = pair(family)
    _, ancestors = random_tree(8)
    cache = model.new_cache(1, 64)

    def step(tokens, n, depth, ancestors, cache):
        hidden, _ = model(tokens, model.nodes(n, depth, ancestors, 64), cache)
        return model.logits(hidden)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for n, seed in ((3, 0), (4, 1), (50, 2)):
        tree = random_tree(8, seed)[1][None]
        args = (tokens_of(8, seed), torch.tensor([n]), tree.sum(-1) - 1, tree)
        with torch._dynamo.config.patch(error_on_recompile=n > 3):
            got = compiled(*args, [kind.clone() for kind in cache])
        assert torch.equal(got, step(*args, [kind.clone() for kind in cache]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(pair, dtype):
    """Catches a float32 island (norm, RoPE, softmax) lost, or an operation that silently promotes to float32."""
    _, exact = pair("llama31")
    _, model = pair("llama31", dtype)
    hidden, _ = feed(model, model.new_cache(1, 41), tokens_of(LENGTH), 0)
    assert hidden.dtype == dtype and model.logits(hidden).dtype == torch.float32
    assert (model.logits(hidden) - run(exact, tokens_of(LENGTH), LENGTH)).abs().mean() < 0.05


def test_batch_training_forward_equals_the_cached_one(pair):
    """Catches a training path that drifts from the inference path, for instance without the window."""
    families = "mistral mixtral qwen3 gemma2 gemma3 glm4 gpt_oss granite olmo3 qwen2_moe smollm3".split()
    for family in (*families, "gemma4", "gemma4-values", "gemma4-moe"):
        _, model = pair(family, torch.float64)
        tokens = tokens_of(24, batch=2)
        assert (model.forward_train(tokens)[0] - feed(model, model.new_cache(2, 32), tokens, 0)[0]).abs().max() < 1e-10


def test_both_spellings_of_transformers_give_one_config():
    """Catches settings that fall back to defaults. transformers 5 renamed rope_scaling and torch_dtype."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}, "torch_dtype": "bfloat16"}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}, "dtype": "bfloat16"}
    base = {**BASE, "model_type": "llama"}
    config = ModelConfig.from_hf({**base, **old})
    assert config == ModelConfig.from_hf({**base, **new})
    assert config.rope.theta == 5e5 and config.rope.kind == "llama3" and config.dtype == "bfloat16"


def test_mutated_rope_settings_never_crash():
    """Catches a division by zero or an overflow deep in a table for odd but well-typed values."""
    rng = random.Random(3)
    values = [None, True, -1, 0, 1, 1.0, 1e-7, 3, 64, 2**31, 10**30, -1.5, 1e308, "x", [], 0.999999, 1.0000001]
    usable = 0
    for _ in range(1500):
        scaling = {"rope_type": rng.choice(ROPE_TYPES), "factor": 4.0, "rope_theta": 1e4, "truncate": True}
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
        scaling |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0}
        scaling |= dict.fromkeys(("attention_factor", "mscale"))
        for _ in range(rng.choice([1, 1, 2, 3])):
            scaling[rng.choice(list(scaling))] = rng.choice(values)
        try:
            config = ModelConfig.from_hf({**BASE, "model_type": "llama", "rope_parameters": scaling})
        except ValueError as error:
            assert "\n" not in str(error)
            continue
        frequencies, scale = config.rope.frequencies(16)
        assert frequencies.isfinite().all() and 0 <= scale < 1e9
        usable += 1
    assert usable > 150
