"""Tensor parallelism: parts of a model in several processes decode what the whole model decodes."""

import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import Indexing, OneDevice, on_fake_gpu
from tiny import held, randomise, tiny_head
from torch.utils._python_dispatch import TorchDispatchMode

import generate
import kernels
from decoding.drafter import PlainDrafter
from decoding.params import SamplingMode
from decoding.step import DecodeState, decode_step
from drafters.medusa import save_medusa
from engine import load, ranks
from families.config import ModelConfig
from layers.build import build_transformer
from loading.drafting import DraftFiles, resolve
from loading.options import DEMO, LoadOptions
from model import Transformer
from support.errors import NotEnoughMemory, UsageError
from weights import shards
from weights.checkpoint import Checkpoint
from weights.files import write_directory
from weights.heads import save_eagle
from weights.hf import config_to_hf, save_hf
from weights.quantized import QuantSpec, pack_, spec_to_json
from weights.rounding import quantize_
from weights.shards import Shard, common_rows

ROOT = Path(__file__).resolve().parent.parent
V = 96
SHAPE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
    vocab_size=V, max_position_embeddings=160,
)  # fmt: skip
FAMILIES = {
    "llama": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"model_type": "phi3"},
    "granite": {"model_type": "granite", **dict.fromkeys(("residual_multiplier", "logits_multiplier"), 0.5),
                "attention_multiplier": 0.2},
}  # fmt: skip
DRAFTERS = [
    {"eagle": "eagle1"},
    {"eagle": "eagle1", "draft_vocab": 40, "tree": "chain:3"},
    {"eagle": "eagle3", "tree": "dynamic:12,3,3"},
    {"draft_checkpoint": "draft", "tree": "chain:3"},
    {"medusa": "medusa", "tree": "chain:2"},
    {"drafter": "ngram", "tree": "chain:4"},
]


def config_of(**changes) -> ModelConfig:
    return ModelConfig(**{"model_type": "llama", **SHAPE, **changes})


def model_of(seed: int = 0, **changes) -> Transformer:
    model = build_transformer(config_of(**changes))
    randomise(model, seed, 0.15)
    model.rotary.build("cpu")
    return model


def cases(size: int) -> list[dict]:
    """Every family plainly, but Qwen3, which is among the quantized models; LLaMA with every drafter, sampled as a batch;
    split embeddings.

    Four processes do less of each kind, and sampled.
    """
    names = [name for name in FAMILIES if name != "qwen3"] if size == 2 else ("llama", "mixtral", "phi3")
    found = [{"checkpoint": name, "temperature": float(size == 4)} for name in names]
    drafters = DRAFTERS if size == 2 else DRAFTERS[2:3]
    found += [{"checkpoint": "llama", "temperature": 1.0, "slots": 3, **drafter} for drafter in drafters]
    found += [{"checkpoint": name, **DRAFTERS[2]} for name in ("int4", "int8", "mixtral-int4")[: 3 if size == 2 else 1]]
    found += [{"checkpoint": name, "split": True, **DRAFTERS[2]} for name in ("llama", "int4")]
    return found + [{"checkpoint": "tied", "split": True}, {"checkpoint": "tied", "rounded": "int4"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints of every kind, heads, and the list of cases."""
    path = tmp_path_factory.mktemp("ranks")
    models = {name: model_of(**changes) for name, changes in FAMILIES.items()}
    for name, model in models.items():
        save_hf(model, path / name)
    save_hf(model_of(7, num_hidden_layers=1), path / "draft")
    for name, family, mode in (w.split() for w in ("int4 llama int4", "int8 qwen3 int8", "mixtral-int4 mixtral int4")):
        spec = QuantSpec(mode, group_size=32)
        model = model_of(**FAMILIES[family])
        quantize_(model, spec)
        config = config_to_hf(replace(model.config, dtype="float16")) | {"eaglet_quant": spec_to_json(spec)}
        write_directory(path / name, model.state_dict(), config)
    for version in (1, 3):
        trimmed = torch.arange(0, V, 2) if version == 3 else None
        head = tiny_head(models["llama"], version, trimmed, hidden_size=64, head_dim=16)
        save_eagle(replace(head.config, target_vocab_size=V), head.state_dict(), path / f"eagle{version}")
    shapes = {"weight": (64, 64), "bias": (64,)}
    parts = [(i, kind) for i in (0, 1) for kind in shapes]
    save_medusa({f"{i}.0.linear.{k}": torch.full(shapes[k], 0.01 * (i + 1)) for i, k in parts}, path / "medusa")
    return path


def test_parts_decode_what_the_whole_model_decodes(folder):
    """Every process emits the tokens that the whole model emits in one, as many a step, with its part of the cache.

    Catches a head, group, expert or row of the vocabulary in the wrong part, a bias added twice, a sum that is left out.
    """
    (folder / "cases.json").write_text(json.dumps({size: cases(size) for size in (2, 4)}))
    done = run(ROOT / "tests/ranks_cases.py", folder, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    assert done.returncode == 0, done.stderr[-2000:]
    for size in (2, 4):
        files = [(folder / f"{size}-{rank}").read_text().splitlines() for rank in range(size)]
        lines = [[json.loads(line) for line in file] for file in files]
        parts = [[line for line in of_rank if not line["whole"]] for of_rank in lines]
        assert all([line["case"] for line in of_rank] == cases(size) for of_rank in parts)
        wholes = {cases(size).index(line["case"]): line for line in sum(lines, []) if line["whole"]}
        assert len(wholes) == len(cases(size))
        for number, whole in wholes.items():
            for of_rank in parts:
                # and tau: the drafts are the same, too
                assert of_rank[number]["texts"] == whole["texts"], whole["case"]
                assert of_rank[number]["cache"] * size == whole["cache"]


def run(*words, env=None, **more) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (env or {})
    how = dict(capture_output=True, text=True, timeout=100, env=environment)
    return subprocess.run([sys.executable, *words], **how, **more)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_requests_that_end_early_leave_the_processes_in_step(folder):
    """A second process that waits for a step that never comes, or runs a step of a request that was left. Then one of
    four processes is killed between two steps: rank 0 names it, and no other rank prints a traceback."""
    done = run(ROOT / "tests/ranks_session.py", folder)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert all(several == alone for several, alone in seen["texts"])
    assert (seen["stopped"], seen["identical"]) == ("interrupted", 12)
    several, alone = seen["facts"]
    assert (several["ranks"], several["exchanges"], alone["ranks"], alone["exchanges"]) == (4, "gloo", 1, None)
    several, alone = several["plan_bytes_per_rank"], alone["plan_bytes_per_rank"]
    assert alone["kv"] > several["kv"] > 0 and alone["weights"] > several["weights"] > 0
    local = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
    assert seen["addresses"] and set(seen["addresses"]) <= local
    assert "a process of --tp 4 has ended (rank 1 with status -9)" in seen["error"]
    assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr
    assert not any(map(alive, seen["pids"]))


def test_a_process_that_never_comes_is_one_line(tmp_path, monkeypatch):
    """A rank that sleeps, one that ends at once, or Ctrl-C while rank 0 waits: the wait ends, and so do the others."""
    (tmp_path / "sleeping.py").write_text("import time\n\ndef follow_leader():\n    time.sleep(1000)\n")
    (tmp_path / "ending.py").write_text("def follow_leader():\n    raise SystemExit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ranks, "MEETING", datetime.timedelta(seconds=1))
    for name in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{name}_SOCKET_IFNAME", "lo")
    children, begin = [], subprocess.Popen

    def started(*words, **more):
        children.append(begin(*words, **more))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", started)
    late = "--tp 3: rank 1, 2 did not come within 1 s; start again."
    early = r"a process of --tp 3 ended before all had met \(rank "
    for module, error, said in (
        ("sleeping", ranks.RankLost, late), ("ending", ranks.RankLost, early), ("sleeping", KeyboardInterrupt, None),
    ):  # fmt: skip
        if error is KeyboardInterrupt:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        if module == "ending":
            monkeypatch.setattr(ranks, "MEETING", datetime.timedelta(seconds=30))
        with pytest.raises(error, match=said):
            ranks.meet(3, "cpu", {}, module)
        assert [child.wait(5) is not None for child in children[-2:]] == [True, True]


def generating(*more: str) -> subprocess.Popen:
    """generate.py in two processes and a session of its own."""
    words = [sys.executable, ROOT / "generate.py", "--tp", "2", "-p", "def f(", "-q", *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("hangs", [False, True])
def test_ctrl_c_ends_all_processes_with_one_line(hangs):
    """A second process that lives on, or a traceback of it, after Ctrl-C in a terminal, which reaches all processes, and
    also where rank 0 alone hears it, while it waits in torch for a stopped process."""
    process = generating("--max-new-tokens", "1500")
    assert process.stdout.read(1)  # the text has begun
    children = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    (child,) = (c for c in children if b"template.py" not in Path(f"/proc/{c}/cmdline").read_bytes())  # the other rank
    try:
        if hangs:
            os.kill(child, signal.SIGSTOP)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130 and errors.decode().count("\n") <= 1 and b"Traceback" not in errors, errors
        assert not alive(child)
        if not hangs:
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)
    finally:
        os.kill(child, signal.SIGKILL) if alive(child) else None
        process.kill()


def test_the_others_end_with_a_killed_leader():
    """A process that nobody knows of, which waits for its leader for ever: the leader was killed while both loaded."""
    process = generating()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)  # the pipes end when the last process that has them ends


def test_ranks_with_other_checkpoints_are_refused(folder, monkeypatch):
    """Parts of two models that decode nonsense together; a rank without a model for which the others wait."""
    words = [sys.executable, ROOT / "generate.py", "--prompt-ids", "1,5", "--max-new-tokens", "4", "--checkpoint"]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    processes = []
    for rank, name in enumerate(("llama", "nothing")):
        environment = os.environ | world | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        processes.append(subprocess.Popen([*words, folder / name], env=environment, text=True, **pipes))
    errors = [process.communicate(timeout=100)[1].strip() for process in processes]
    assert processes[0].returncode == 2 and processes[1].returncode != 0
    assert errors[0].startswith("error  rank 1: ") and "\n" not in errors[0]
    engine, other = generate.load(folder / "llama"), Others(("another", ""))
    monkeypatch.setattr(load, "_load", lambda *_: engine)
    with pytest.raises(ranks.OtherRank, match="rank 1 has another checkpoint, or other options, than rank 0"):
        load._load_part(LoadOptions(), other, None, print)


def test_what_cannot_be_split_is_refused_by_name(folder):
    """Groups that cross the boundary of two parts, act-order, and rows that were scaled as a whole."""
    tensors = Checkpoint.open(folder / "int4").entries
    scales = next(name for name in tensors if name.endswith("down.scales"))
    odd = {scales: tensors[scales]._replace(shape=(3, 64))}
    with pytest.raises(UsageError, match=r"down.scales has 3 rows, words or groups along its axis 0, .* --group-size"):
        Shard(0, 2).entries(odd | {scales.replace("scales", "qweight"): tensors[scales]}, config_of(), "here")
    index = tensors[scales]._replace(shape=(64,), read=lambda: torch.arange(64).flip(0))
    part = Shard(0, 2).entries({"model.layers.0.mlp.down_proj.g_idx": index}, config_of(), "here")
    with pytest.raises(UsageError, match="act-order"):
        part["model.layers.0.mlp.down_proj.g_idx"].read()
    with pytest.raises(UsageError, match="--quant int8 scales whole rows"):
        Checkpoint.open(DEMO).rounded("int8").sharded(Shard(0, 2))


class Others:
    """The processes as `load` sees them. The other one says what a test lets it say."""

    rank, size, here = 0, 2, 2

    def __init__(self, *told: tuple):
        self.told = list(told)

    def gather(self, value):
        return [value, self.told.pop(0)]

    heard = ranks.Ranks.heard


@pytest.mark.parametrize("name, mode", [
    ("llama", "reference"), ("tied", "reference"), ("int4", "reference"), ("tied", "cpu"),
])  # fmt: skip
def test_the_embedding_is_split_only_where_a_rank_could_not_hold_it_whole(folder, name, mode, monkeypatch):
    """An exchange more although memory suffices; ranks of which only one splits; a plan that is not of one part."""
    dtype = {"reference": torch.float64, "cpu": torch.float32}[mode]
    asked = LoadOptions(str(folder / name), device="cpu", dtype=str(dtype)[6:], kernels=mode, ctx=64)

    def planned(free: int, other: bool):
        monkeypatch.setattr(load, "free_memory", lambda device: 2 * free)  # of a CPU that two processes share
        checkpoint, said = asked.open_checkpoint().sharded(Shard(0, 2)), []
        options = resolve(asked, checkpoint)
        checkpoint, plan = load.check_plan(checkpoint, DraftFiles(), options, Others((other, "")), said.append)
        with kernels.KernelBackend(mode, "cpu").active():
            part = checkpoint.load("cpu", dtype)
            ids = torch.tensor([0, 3, 40])
            rows = part.embed_tokens(ids)
            pack_(part, dtype)
            assert torch.equal(part.embed_tokens(ids), rows)
        assert plan.weights == held(part) - held(part.rotary)
        return plan.total, checkpoint.shard.embedding, said

    monkeypatch.setattr(shards, "rank_sum", lambda x, ranks: x)
    plenty, whole, said = planned(1 << 30, False)
    assert not whole and not said
    saved = dtype.itemsize * V * 64 // 2  # half of the table,
    saved *= 2 if mode == "cpu" else 1  # and the half of it that is the LM head, which these kernels lay out anew
    assert planned(plenty - 1, False)[1] and planned(1 << 30, True)[0] == plenty - saved
    with pytest.raises(NotEnoughMemory, match="not enough memory"):
        planned(plenty - saved - 1, False)
    with pytest.raises(ranks.OtherRank, match="rank 1: no such file"):
        load.check_plan(
            asked.open_checkpoint().sharded(Shard(0, 2)), DraftFiles(), resolve(asked, Checkpoint.open(folder / name)),
            Others((None, "no such file")), print,
        )  # fmt: skip


def test_rows_of_a_split_matrix_keep_their_bits(monkeypatch):
    """-0.0 that becomes 0.0 because another rank adds nothing to it, or a row that two ranks give."""
    table = torch.tensor([[-0.0, 1.5], [2.0, -0.0], [0.0, -3.0], [-0.0, -0.0]], dtype=torch.float16)
    ids, parts = torch.tensor([[3, 0, 1], [2, 3, 0]]), []
    monkeypatch.setattr(shards, "rank_sum", lambda x, ranks: parts.append(x) or x)
    for rank in (0, 1):
        common_rows(ids, 2, table[2 * rank : 2 * rank + 2].__getitem__, Shard(rank, 2))
    both = parts[0] + parts[1]
    assert torch.equal(both.view(torch.int16), table[ids].view(torch.int16))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral", "int4"])
def test_a_step_exchanges_two_sums_per_layer_and_the_logits(folder, name, split, monkeypatch):
    """A value that a part reads on the host, or an exchange more than a step needs."""
    properties = SimpleNamespace(multi_processor_count=82, L2_cache_size=6 << 20, major=8, minor=6, name="fake")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    part = Checkpoint.open(folder / name).sharded(Shard(0, 2, split)).load("cpu", torch.float16)
    layers = part.config.num_hidden_layers
    with torch._subclasses.fake_tensor.FakeTensorMode(), Indexing():
        on_fake_gpu(part)
        drafter = PlainDrafter(part)
        state = DecodeState(part, drafter, 1, 120)
        with Counted() as counted, OneDevice(), torch.inference_mode():
            decode_step(part, drafter, state, SamplingMode())
    assert counted.found == {"eaglet::rank_sum": 2 * layers + split, "eaglet::rank_concat": 1}


class Counted(TorchDispatchMode):
    """Counts the exchanges between ranks."""

    def __init__(self):
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().startswith("eaglet::rank"):
            self.found[function.name()] = self.found.get(function.name(), 0) + 1
        return function(*args, **(kwargs or {}))
