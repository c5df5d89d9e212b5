"""Fixtures shared by all tests: tiny random checkpoints of every family, and which tests run where."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: on tiny matrices more threads only wait for each other
# The tests speak to their own servers without TLS. Each httpx.post would read the certificates of the world, for 45 ms.
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
os.environ.pop("SSL_CERT_FILE", None)
# Bytecode is kept, even where the environment says otherwise: the tests start a hundred programs of this project, and
# every worker rewrites the assertions of every file.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until all files are imported, see `pytest_collection_finish`

with contextlib.suppress(ImportError):  # before the kernels, which import it only where something runs it
    import triton  # noqa: F401

import interpreting  # noqa: E402
import torch  # noqa: E402

from support import cache  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreting.speed_up()

BASE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    "initializer_range": 0.125,  # 1 / sqrt(hidden_size): logits spread by about 1
}  # fmt: skip


def rope(kind: str, theta: float = 10000.0, **more: float) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MINISTRAL3 = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
WIDE_HEADS, TIED = {"head_dim": 32}, {"tie_word_embeddings": True}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
YARN64 = {"factor": 4.0, "original_max_position_embeddings": 64}


def ropes(full: dict, sliding_theta: float) -> dict:
    """Rotations of layers with full attention, and of those with a window."""
    sliding = {"rope_type": "default", "rope_theta": sliding_theta}
    return {"rope_parameters": {"full_attention": full["rope_parameters"], "sliding_attention": sliding}}


GEMMA = WIDE_HEADS | TIED | {"query_pre_attn_scalar": 32, "sliding_window": 8}
# family -> (transformers config class, what differs from BASE)
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaConfig", TIED | rope("llama3", 5e5, factor=32.0, **LLAMA3)),
    "llama31": ("LlamaConfig", rope("llama3", 5e5, factor=8.0, **LLAMA3)),
    "codellama": ("LlamaConfig", rope("default", 1e6)),
    "linear": ("LlamaConfig", rope("linear", factor=4.0)),
    "yarn": ("LlamaConfig", rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "yarn-set": (
        "LlamaConfig",
        {"num_hidden_layers": 2} | rope("yarn", **YARN64, beta_fast=8.0, beta_slow=2.0, truncate=False),
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "mistral-full": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {"sliding_window": 8, "use_sliding_window": False}),
    "qwen2-window": ("Qwen2Config", TIED | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", WIDE_HEADS),
    "phi3": ("Phi3Config", {"sliding_window": 8}),
    "phi3-partial": (
        "Phi3Config",
        {"num_attention_heads": 2, "num_key_value_heads": 1} | rope("default", partial_rotary_factor=0.75),
    ),
    "phi3-long": (
        "Phi3Config",
        TIED | {"original_max_position_embeddings": 80} | rope("longrope", partial_rotary_factor=0.5, **FACTORS),
    ),
    "glm4": ("Glm4Config", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "ernie4_5": ("Ernie4_5Config", WIDE_HEADS | TIED | {"use_bias": True}),
    "exaone4": ("Exaone4Config", WINDOWS),
    "exaone4-full": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ministral": ("MinistralConfig", WIDE_HEADS | WINDOWS | {"layer_types": sorted(WINDOWS["layer_types"])}),
    "smollm3-default": ("SmolLM3Config", {"num_hidden_layers": 4, "rms_norm_eps": 1e-5, "pad_token_id": 0}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "seed_oss": ("SeedOssConfig", {"attention_bias": True, "head_dim": 32}),
    "granite": (
        "GraniteConfig",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "gemma": ("GemmaConfig", WIDE_HEADS | TIED | {"hidden_act": "gelu"}),
    "gemma2": ("Gemma2Config", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", GEMMA | WINDOWS | ropes(rope("linear", 1e6, factor=4.0), 1e3)),
    "gemma3-scale": (
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8, "final_logit_softcapping": 2.0},
    ),
    "olmo2": ("Olmo2Config", {"rms_norm_eps": 1e-5}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": ("Olmo3Config", WINDOWS | ropes(rope("yarn", 5e5, **YARN64), 5e5)),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
        | WINDOWS
        | rope("yarn", 1e5, **YARN64, truncate=False),
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        EXPERTS
        | {"num_experts": 8, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "head_dim": 32}
        | {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    ),
    "glm4_moe-plain": ("Glm4MoeConfig", EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 0}),
    "hunyuan": ("HunYuanDenseV1Config", WIDE_HEADS | rope("dynamic", alpha=50.0, factor=1.0)),
    "hunyuan-bias": ("HunYuanDenseV1Config", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 16}),
    "ministral3": ("Ministral3Config", WIDE_HEADS | rope("yarn", 1e4, factor=4.0, **MINISTRAL3)),
    "qwen2_moe": ("Qwen2MoeConfig", EXPERTS | {"sliding_window": None, "shared_expert_intermediate_size": 80}),
    "qwen3_moe-normed": ("Qwen3MoeConfig", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"norm_topk_prob": False}),
}


DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
DELTA |= {"head_dim": 32, "num_hidden_layers": 4, **rope("default", partial_rotary_factor=0.25)}
SHARED = {"shared_expert_intermediate_size": 80}
FAMILIES |= {
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", DELTA | EXPERTS | SHARED),
    "qwen3_next": ("Qwen3NextConfig", DELTA | EXPERTS | SHARED),
}
# What Gemma 4's models have of their own: E2B and E4B layers that share keys, and an embedding for each layer; 31B and
# the unified 12B keys as values; 26B-A4B experts beside an MLP.
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "tie_word_embeddings": True, "sliding_window": 8, "pad_token_id": 0}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
GEMMA4_ROPES = ropes(rope("proportional", 1e6, partial_rotary_factor=0.25), 1e3)
NO_INPUTS = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
FAMILIES |= {
    "gemma4": (
        "Gemma4TextConfig",
        GEMMA4
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 128}
        | {"hidden_size_per_layer_input": 8, "final_logit_softcapping": 2.0},
    ),
    "gemma4-values": ("Gemma4TextConfig", GEMMA4 | GEMMA4_ROPES | NO_INPUTS),
    "gemma4-moe": ("Gemma4TextConfig", GEMMA4 | NO_INPUTS | EXPERTS | {"enable_moe_block": True, "top_k_experts": 2}),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
}


def empty_cache_in(folder: Path) -> Path:
    """An empty cache folder in `folder`, but for the C++ kernels, whose build takes 20 seconds."""
    built, made = cache.folder() / "kernels", folder / "cache"
    built.mkdir(parents=True, exist_ok=True)
    made.mkdir()
    (made / "kernels").symlink_to(built)
    return made


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test alone."""
    made = empty_cache_in(tmp_path)
    monkeypatch.setenv("EAGLET_CACHE", str(made))
    return made


@pytest.fixture(autouse=True)
def ctrl_c_as_it_was():
    """Undo what a command does to Ctrl-C in its own process, where a test runs it in this one.

    A run in the background (`nohup make test &`) ignores Ctrl-C, and so would every command that a test starts.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unraisable = sys.unraisablehook
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = unraisable


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


# The files that take longest, in seconds of one core. A worker takes whole files, so the short ones come last. Only
# test_widths comes early because its fake tensors end with bad_alloc, inside torch, in a process that has compiled much.
LONGEST = """
test_ranks test_widths test_interpreter test_interpreter_steps test_engine test_recurrent test_generate test_mtp
test_train_eagle test_runner test_gguf test_cpu_kernels test_rank_commands test_bench test_quantize test_gpu_script
test_eagle test_package test_drafters test_launches test_interrupts test_kernel_gate test_kernels test_serving_limits
test_tokenizer test_rank_files test_streams test_sampling test_tree test_shipped_heads
""".split()


def pytest_configure(config: pytest.Config) -> None:
    """Have xdist hand out the files in the order below. By itself it begins with those that have the most tests."""
    if "loadscopereorder" in vars(config.option):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    wanted = config.getoption("-m") or ""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("slow") and not config.getoption("--slow") and "slow" not in wanted:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


def pytest_collection_finish() -> None:
    """Have the garbage collector leave the modules alone. It went through their million objects again and again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries of C++ count their objects at the end, and report those that were never collected."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter) -> None:
    """Say why tests were skipped, one line for each reason."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count:4d}: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(params=("triton",) if os.environ.get("TRITON_INTERPRET") == "1" else ("reference", "cpu"))
def each(request: pytest.FixtureRequest):
    """The kernels that do all calls of a test."""
    from tiny import skip_without_kernels

    from kernels import KernelBackend

    skip_without_kernels(request.param)
    with KernelBackend(request.param, "cpu").active() as backend:
        yield backend


def build_hf(family: str, **changes):
    """A random transformers model of the family in float32. Norms and biases are random too, so that none is inert."""
    transformers = pytest.importorskip("transformers")
    cls, more = FAMILIES[family]
    config = getattr(transformers, cls)(**{**BASE, **more, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, family)))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        stored = ("layer_scalar", "e_score_correction_bias")
        buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(stored)]
        for tensor in (*model.parameters(), *buffers):
            if tensor.dim() == 1:
                tensor.data.add_(torch.randn_like(tensor), alpha=0.1)
    if any(kind in family for kind in ("mixtral", "moe", "next", "gpt_oss")):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """tiny_checkpoint(family) is a directory that transformers' save_pretrained wrote, once per session."""

    @functools.cache
    def make(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        build_hf(family).save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="module")
def server(engine):
    """A server of a test file's own engine."""
    from serving_kit import running  # needs packages that the other tests do without

    with running(engine, max_queue=20) as server:
        yield server


@pytest.fixture
def client(server):
    """OpenAI's client of that server."""
    openai = pytest.importorskip("openai", reason="the client needs openai (requirements-dev.txt)")
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client
