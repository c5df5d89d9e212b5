"""What a machine with a GPU runs: `make gpu`, step times of random models of real shapes, and their CUDA calls."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fake_cuda import OneDevice, fake_gpu, step_engine

import generate
import model as model_module
from bench import random_models, records, steps
from bench.arms import NO_STOP
from bench.measure import step_bytes
from bench.peers import TorchArm, int4_linear
from decoding.params import SamplingParams
from decoding.step import decode_step
from scripts import bench, gpu
from support.files import read_json_lines

TINY = ["--device", "cpu", "--tiny"]


@pytest.fixture(autouse=True)
def usual_sigterm():
    """Puts the handler of SIGTERM back that `gpu.main` replaces."""
    usual = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, usual)


# ---- make gpu ----------------------------------------------------------------------------------------------


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "cpu-tiny-summary.json").read_text())


def endings(folder: Path) -> dict[str, int | str]:
    """How each part ended, by its name."""
    return {part["part"]: part["ended"] for part in summary_of(folder)["parts"]}


def packed(folder: Path, kind: str) -> dict[str, str]:
    """The texts in one of the two archives, by file name."""
    with tarfile.open(folder / f"cpu-tiny-{kind}.tar.gz") as archive:
        return {Path(name).name: archive.extractfile(name).read().decode() for name in archive.getnames()}


def short_visit(monkeypatch, checks=(), timed=()):
    """Let `gpu.main` run these parts: (name, Python code) or a Part. Ctrl-C has a second to work."""

    for name, given in (("checks", checks), ("timed", timed)):
        parts = [p if isinstance(p, gpu.Part) else gpu.Part(p[0], (sys.executable, "-c", p[1]), 2) for p in given]
        monkeypatch.setattr(gpu, name, lambda *_, parts=parts: parts)
    monkeypatch.setattr(gpu, "GRACE", 1.0)


def test_a_tiny_visit_writes_the_records_of_its_parts(tmp_path):
    """A part whose command cannot run, that leaves no record, or that is not one of the two phases."""
    assert gpu.main([*TINY, "--seconds", "100", "--out", str(tmp_path), "--only", "equal-kernels", "int4"]) == 0
    summary, logs = summary_of(tmp_path), packed(tmp_path, "logs")
    ran = [f"{part['phase']}-{part['part']}" for part in summary["parts"]]
    assert sorted(ran) == ["timed-int4", "untimed-equal-kernels", "untimed-int4"] and ran[-1] == "timed-int4"
    assert set(logs) == {f"{name}.log" for name in ran} and "test_kernels_gpu" in logs["untimed-equal-kernels.log"]
    assert all(part["ended"] == 0 for part in summary["parts"]) and summary["environment"]["versions"]["torch"]
    ((name, record),) = packed(tmp_path, "records").items()
    timed = [json.loads(line) for line in record.splitlines()]
    assert name == "int4.jsonl" and {line["nodes"] for line in timed if line["type"] == "step"} == {1, 16, 60}
    kernels = [line["microseconds"] for line in timed if line["type"] == "kernels"]
    assert len(kernels) == 3 and all(times and min(times.values()) > 0 for times in kernels)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_parts_of_a_visit_come_in_the_order_of_their_weight(monkeypatch):
    """Rows that are compared after the rest, a word that chooses no test, and figures that nobody waits for before the
    plain step."""
    parts = gpu.checks(False, 1)
    assert [p.name for p in parts] == "equal-engine equal-kernels tests-engine tests-kernels prove".split()
    for tiny in (False, True):
        generate.build_parser().parse_args(gpu.checks(tiny, 1)[-1].command[2:])
        generate.build_parser().parse_args(gpu.timed("cpu", tiny)[-1].command[4:])
    words, rest = parts[0].command[-1], parts[2].command[-1]
    assert rest == f"not ({words})" and parts[1].command[-1] == words
    tests = "".join((gpu.ROOT / "tests" / f"test_{kind}_gpu.py").read_text() for kind in ("engine", "kernels"))
    names = re.findall(r"^def (test_\w+)", tests, re.M)
    assert all(any(word in name for name in names) for word in words.split(" or "))
    monkeypatch.setenv("EAGLET_SMOLLM2", "file")
    names = [part.name for part in gpu.timed("cuda", False)]
    assert names[:10] == "int4 demo smollm2 prompts torch-int4 bf16 int8 l2-7b-int4 q35-9b-int4 mixtral-int4".split()
    assert names[10:] == ["tilings", "start-cold", "start-warm"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_says_where_torch_is_missing():
    """A traceback on a machine whose Python has no torch."""
    command = ["make", "gpu", "PYTHON=none", f"BASE_PYTHON={sys.executable} -S"]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True)
    assert done.returncode and "has no torch" in done.stderr and "Traceback" not in done.stderr


def test_parts_that_fail_or_hang_do_not_end_the_visit(tmp_path, monkeypatch, capsys):
    """A part that raises, is killed, or ignores the interrupt ends the visit, an interrupted one loses what it wrote, and
    one that lacks a module or memory is run. A visit that takes longer than it may, and parts that were not begun and are
    not named."""
    kept = tmp_path / "kept.txt"
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)"
    polite = f"import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: open(r'{kept}', 'w').write('kept')"
    nothing = (sys.executable, "-c", "raise SystemExit(1)")
    timed = [
        ("raises", "raise RuntimeError('no such kernel')"),
        ("killed", "import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
        gpu.Part("bare", nothing, 2, ("sys", "no_such_module")),
        gpu.Part("large", nothing, 2, (), math.inf),
        ("middle", "print('so good')"),
        gpu.Part("polite", (sys.executable, "-c", polite), 90),
        ("never", ""),
    ]
    monkeypatch.setattr(gpu.math, "inf", 24.0)  # the memory of a CPU
    monkeypatch.setattr(gpu, "LEAST", 0.5)
    monkeypatch.setattr(gpu, "CHECKING", 0.25)
    short_visit(monkeypatch, [("deaf", deaf)], timed)
    began = time.monotonic()
    assert gpu.main([*TINY, "--seconds", "6", "--out", str(tmp_path)]) == 1
    assert time.monotonic() - began < 6 + 5  # generous: the machine may be slow
    printed = capsys.readouterr().out
    assert "bare: skipped, because no_such_module cannot be imported" in printed
    assert "large: skipped, because it needs inf GB of memory, and the device has 24" in printed
    assert "failed: untimed deaf, timed raises, timed killed, timed polite; not begun: never" in printed
    assert printed.index("so far") < printed.index("so good") < printed.index("timed polite")
    ended = endings(tmp_path)
    assert list(ended.values())[1:6] == [1, -9, "skipped", "skipped", 0] and ended["never"] == "not begun"
    assert all(str(ended[name]).startswith("stopped after") for name in ("deaf", "polite"))
    logs = packed(tmp_path, "logs")
    assert "RuntimeError: no such kernel" in logs["timed-raises.log"] and "so good" in logs["timed-middle.log"]
    assert kept.read_text() == "kept"


def test_untimed_parts_run_together_and_timed_ones_alone(tmp_path, monkeypatch):
    """Checks that wait for each other, a benchmark that is timed beside another, and memory that is taken twice."""
    meet = "import pathlib, time; pathlib.Path(r'{0}/{1}').touch()\n"
    meet += "while not pathlib.Path(r'{0}/{2}').exists(): time.sleep(0.05)"
    pair = [("a", meet.format(tmp_path, "a", "b")), ("b", meet.format(tmp_path, "b", "a"))]
    lonely = "import pathlib, time; at = pathlib.Path(r'{0}/lonely'); at.mkdir(); time.sleep(0.15); at.rmdir()"
    command = sys.executable, "-c", lonely.format(tmp_path)
    large = [gpu.Part(f"large {i}", command, 2, (), 20) for i in range(2)]
    monkeypatch.setattr(gpu.math, "inf", 24.0)
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 4)
    short_visit(monkeypatch, checks=[*pair, *large], timed=[(f"timed {i}", command[-1]) for i in range(2)])
    assert gpu.main([*TINY, "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_visit_that_is_cut_short_keeps_what_ended(tmp_path, number, code):
    """Ctrl-C or SIGTERM that leaves a part running on the GPU, or does not name the parts behind it; files that are
    written at the end alone."""
    two = f"import os, time; open({str(tmp_path / 'running')!r}, 'w').write(str(os.getpid()))\n"
    two += f"os.kill(os.getppid(), {number:d}); time.sleep({60 * (code > 0)})"
    parts = "[gpu.Part(name, (sys.executable, '-c', code), 9) for name, code in CODES]"
    program = f"import sys\nfrom scripts import gpu\nCODES = {[('one', 'print(7)'), ('two', two), ('three', '')]}\n"
    program += f"gpu.GRACE, gpu.checks, gpu.timed = 1.0, (lambda *_: []), (lambda *_: {parts})\n"
    program += f"sys.exit(gpu.main({[*TINY, '--out', str(tmp_path)]}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=gpu.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    ended = endings(tmp_path)
    assert ended["one"] == 0 and packed(tmp_path, "logs")["timed-one.log"] == "7\n"
    if code > 0:
        assert list(ended) == ["one", "two", "three"] and ended["three"] == "not begun"
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "running").read_text()), 0)


def test_the_records_name_the_commit_of_this_project(tmp_path, monkeypatch):
    """The commit of another repository around a copy without .git, and a commit that was given and is not recorded."""
    monkeypatch.delenv(records.COMMIT, raising=False)
    monkeypatch.setattr(records, "__file__", str(gpu.ROOT / "bench" / "records.py"))
    answers = {"--show-toplevel": str(gpu.ROOT.parent), "HEAD": "0123456789ab"}
    monkeypatch.setattr(records, "_output", lambda command: answers.get(command[-1], ""))
    assert records.source() == {"commit": None, "dirty": None}
    answers["--show-toplevel"] = str(gpu.ROOT)
    assert records.source() == {"commit": "0123456789ab", "dirty": False}
    show = "import os; assert os.path.isdir('{work}')\n"
    show += f"open(r'{tmp_path}/commit', 'w').write(os.environ['{records.COMMIT}'])"
    short_visit(monkeypatch, timed=[gpu.Part("one", (sys.executable, "-c", show), 30)])
    monkeypatch.setenv(records.COMMIT, "abc123")
    assert gpu.main([*TINY, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "commit").read_text() == summary_of(tmp_path)["environment"]["git"]["commit"] == "abc123"


@pytest.mark.parametrize("arguments,message", [
    (["--device", "cpu"], "needs --tiny"), (["--device", "cuda"], "sees no CUDA device"),
    ([*TINY, "--only", "zebra"], "the parts are equal-engine, equal-kernels, prove"),
])  # fmt: skip
def test_usage_errors_are_one_line(arguments, message, tmp_path, capsys):
    """A wrong device and an unknown part end with exit code 2 before anything runs."""
    assert gpu.main(["--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


# ---- step times --------------------------------------------------------------------------------------------


def test_step_times_need_torch_and_numpy_alone(tmp_path):
    """A machine with a GPU and no other package, and an import before the first figure that it does not need."""
    wanted = "tqdm safetensors sentencepiece tokenizers jinja2 prompt_toolkit llguidance starlette uvicorn pytest"
    wanted += " transformers gguf ray torch._inductor.compile_fx"
    flags = "--device cpu --shape tiny --quant int4 --steps 32 --ctx 128 --only plain -q --json".split()
    code = f"import sys; sys.modules |= dict.fromkeys({wanted.split()})\nfrom scripts import bench, gpu\n"
    code += f"sys.exit(bench.main({[*flags, str(tmp_path / 'first.jsonl')]}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=gpu.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "step of plain, batch 1, context 32" in done.stderr, done.stderr
    assert len(read_json_lines(tmp_path / "first.jsonl")) == 3


def test_step_times_have_a_line_per_arm_batch_and_context(tmp_path, capsys):
    """Arms, plain widths and batches are all timed at every context, and the ratios refer to plain decoding."""
    out = tmp_path / "steps.jsonl"
    flags = "--device cpu --shape tiny --steps 16,40 --widths 4 --batches 1,2 --ctx 64 --max-new-tokens 4 -q".split()
    assert bench.main([*flags, "--arm", "e3=eagle=random:3;tree=chain:3", "--json", str(out)]) == 0
    *lines, summary = read_json_lines(out)
    assert summary["steps"] == lines[::2] and "step ms" in capsys.readouterr().out
    rows = {(line["arm"], line["batch"], line["context"]): line for line in lines[::2]}
    names = {"plain": 1, "e3": 4, "plain, 4 nodes": 4}
    assert set(rows) == {(name, batch, context) for name in names for batch in (1, 2) for context in (16, 40)}
    for (name, _, _), line in rows.items():
        assert line["nodes"] == names[name] and 0 < line["p10"] <= line["ms"] <= line["p90"] and not line["captured"]
        assert (name == "plain") <= (line["of_plain"] == 1)
    one, two = (rows["plain", batch, 40]["bytes"] for batch in (1, 2))
    kv = random_models.SHAPES["tiny"]
    cached = 2 * kv.num_key_value_heads * kv.head_dim * kv.num_hidden_layers * 4 * 40
    assert two - one == cached + 4 * kv.hidden_size  # and one more row of the embedding


def test_a_step_time_is_written_at_once_and_an_arm_that_fails_loses_no_other(tmp_path, monkeypatch, capfd):
    """All step times of a run that is killed under the profiler, and those of the arms behind one that raises."""
    out, seen = tmp_path / "steps.jsonl", []

    def profiled(*_):
        seen.append([line["type"] for line in read_json_lines(f"{out}.part")])
        if len(seen) == 2:
            raise RuntimeError("no profiler here")
        return {}

    monkeypatch.setattr(steps.Ready, "kernel_times", profiled)
    flags = "--device cpu --shape tiny --steps 16 --widths 4,5 --ctx 128 -q --only plain".split()
    assert bench.main([*flags, "--json", str(out)]) == 1
    assert seen == [["step"], ["step", "kernels", "step"], ["step", "kernels", "step", "failed", "step"]]
    *_, summary = read_json_lines(out)
    assert [line["arm"] for line in summary["steps"]] == ["plain", "plain, 4 nodes", "plain, 5 nodes"]
    assert summary["failed"][0]["error"] == "RuntimeError: no profiler here"
    said = capfd.readouterr().err
    assert "Traceback" in said and "step of plain, batch 1, context 16: " in said


def test_step_times_need_room(capsys):
    """A context that does not fit --ctx, a list that is none, and a number that is too small, are one line each."""
    assert bench.main("--device cpu --shape tiny --steps 100 --ctx 64 --max-new-tokens 4 -q".split()) == 2
    assert "needs 108 of 64 tokens" in capsys.readouterr().err
    for flags, message in (("--steps 1,x", "expected numbers like 1,8,60"), ("--reps 0", "allowed: 1 or more")):
        with pytest.raises(SystemExit, match="2"):
            bench.main(f"--device cpu --shape tiny {flags} -q".split())
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("shape,quant,version,nodes,gigabytes", [
    ("llama-3-8b", "", 0, 1, (1.9, 2.0)), ("llama-3-8b", "int4", 3, 60, (2.9, 3.2)),
    ("llama-2-7b", "int8", 1, 26, (2.3, 2.5)), ("mixtral-8x7b", "int4", 0, 1, (0.5, 0.6)),
])  # fmt: skip
def test_real_shapes_build_and_step_on_a_fake_gpu(monkeypatch, shape, quant, version, nodes, gigabytes):
    """A step of 2 layers of each shape runs on fake CUDA tensors and reads about the bytes of its format. Quantized
    layers keep one copy of their weights, in the kernels' layout."""
    pytest.importorskip("triton", reason="a GPU's backend is Triton")
    with fake_gpu(monkeypatch):
        engine = step_engine(shape, quant, version, nodes, 2)
        engine.pin(128)
        with torch.inference_mode(), engine.backend.active(), OneDevice():
            out = decode_step(engine.model, engine.drafter, engine.state, SamplingParams().mode)
        assert out.emitted.shape == (1, engine.drafter.D + 1) and engine.drafter.N == nodes
        low, high = gigabytes
        assert low < step_bytes(engine, 128) / 1e9 < high
        if quant:
            assert engine.model.layers[0].attention.qkv.packed.layout == "planes"
            assert engine.model.layers[0].attention.qkv.qweight is None


@pytest.mark.parametrize("quant", ["", "int4", "int8"])
def test_random_weights_of_a_deep_model_stay_finite(quant):
    """The activations of 80 layers of random weights stay far from what fp16 can hold."""
    larger = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=80, windows=())
    config = replace(random_models.SHAPES["tiny"], **larger)
    with torch.no_grad():
        model = random_models.random_model(config, quant, torch.device("cpu"), torch.float32)
        kv, n = model.new_cache(1, 40), torch.zeros(1, dtype=torch.int64)
        nodes = model.nodes(n, torch.arange(8)[None], model_module.chain_ancestors(1, 8, "cpu"), 40)
        hidden, taps = model(torch.arange(8)[None] * 31, nodes, kv, (2, 40, 80))
        logits = model.logits(hidden)
        assert torch.isfinite(logits).all() and 0.3 < logits.std() < 3
        assert taps.abs().max() < 1000 and kv[0].abs().max() < 100
        head = random_models.random_head(model, "3", quant)
        assert 0.2 < head.predict(head.fuse(taps)).std() < 5


def test_the_cuda_timing_code_uses_the_api_as_it_is(monkeypatch):
    """The calls of torch.cuda that timing makes have the signatures of the real functions, and `pin` is not timed."""
    calls = []
    for name in ("Event", "CUDAGraph", "Stream", "current_stream", "stream", "graph", "synchronize", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.create_autospec(getattr(torch.cuda, name)))
    torch.cuda.Event.return_value.elapsed_time.return_value = 1.5
    device = torch.device("cuda")
    assert steps.captured(print, torch.device("cpu")) is print
    replay = steps.captured(lambda: calls.append("call"), device)
    assert len(calls) == 3 and replay == torch.cuda.CUDAGraph.return_value.replay
    torch.cuda.Event.return_value.record.side_effect = lambda: calls.append("record")
    ready = steps.Ready.__new__(steps.Ready)
    engine = SimpleNamespace(pin=calls.append, backend=SimpleNamespace(active=nullcontext))
    ready.engine, ready.device, ready.step = engine, device, lambda: calls.append("call")
    assert ready.time(7) == 1.5
    assert calls[3:] == [7, "record", "call", "record"]


# ---- torch by itself, as a peer ----------------------------------------------------------------------------


def test_torch_alone_decodes_our_tokens():
    """A peer that is fast because it computes another model: on float weights it decodes what ours decodes, and on int4
    what ours decodes on the floats that its codes stand for."""
    with torch.inference_mode():
        engine = random_models.random_engine("tiny", device="cpu", dtype="float32", ctx=64)
        params = SamplingParams(max_new_tokens=24, stop_ids=NO_STOP)
        prompt = list(range(7, 20))
        want = engine.generate_batch([prompt], params).run()[0].token_ids
        assert len(set(want)) > 3
        peer = TorchArm(engine.model, 64, False)
        assert peer.run(prompt, params).token_ids == want == peer.run(prompt, params).token_ids

        weight, x = torch.randn(64, 96), torch.randn(5, 96)
        linear = int4_linear(weight)
        scale, offset = linear.keywords["qScaleAndZeros"].transpose(0, 1).unsqueeze(-2).unbind(-1)
        groups = weight.view(64, 3, 32)
        codes = ((groups - offset[..., 0, None]) / scale[..., 0, None]).round().clamp(-8, 7)
        restored = (codes * scale[..., 0, None] + offset[..., 0, None]).view(64, 96)
        assert 0 < (restored - weight).abs().max() <= scale.max() * 0.501
        torch.testing.assert_close(linear(x), x @ restored.T, rtol=1e-4, atol=1e-4)


def test_torch_alone_runs_beside_our_engine(tmp_path, capsys):
    """The peer's flag, its int4 weights made from packed ones, and what it cannot run, each in one line."""
    out = tmp_path / "peer.jsonl"
    flags = "--device cpu --shape tiny --baseline torch --only plain --max-new-tokens 4 --reps 1 --limit 1 -q".split()
    assert bench.main([*flags, "--quant", "int4", "--temperature", "0", "--json", str(out)]) == 0
    rows = read_json_lines(out)[-1]["rows"]
    assert [row["arm"] for row in rows] == ["plain", "torch int4"] and rows[1]["speedup"]["median"] > 0
    assert bench.main(flags) == 2 and "--temperature 0" in capsys.readouterr().err
    flags[flags.index("tiny")] = "tiny-moe"
    assert bench.main([*flags, "--temperature", "0"]) == 2 and "leave it out" in capsys.readouterr().err
