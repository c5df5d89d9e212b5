"""`make gpu` on a machine without a GPU: the same scripts on small shapes, and the real shapes as fake tensors."""

import inspect
import json
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from fake_cuda import OneDevice, fake_gpu_cells

import kernels
import model as model_module
import tree as trees
from bench import gpu_report, kernel_timing, random_models, step_cells, step_run, step_time, timing
from bench.environment import environment
from bench.measure import step_bytes
from engine import Engine, EngineConfig
from options import COMPILE_MODES, LoadOptions
from sampling import SamplingParams
from scripts import bench_kernels, gpu
from scripts import step_time as command
from step import decode_step
from support.files import append_json_lines, read_json, read_json_lines

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--device", "cpu", "--tiny", "--steps", "4", "--repeats", "3"]


def cells(path: Path) -> list[dict]:
    return [line for line in read_json_lines(path) if line["type"] == "step_time"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """One run over all tiny cells."""
    path = tmp_path_factory.mktemp("steps") / "steps.jsonl"
    assert command.main(["--json", str(path), *TINY]) == 0
    return path


def test_every_cell_is_written_and_its_numbers_recount(measured):
    """A field lost on the day there is a GPU; a share, break-even or rate that does not follow from its parts."""
    rows = cells(measured)
    assert [row["key"] for row in rows] == [cell.key for cell in step_cells.tiny_cells()]
    plain = {(r["shape"], r["quant"], r["context"]): r["step_ms"]["median"] for r in rows if not r["head"]}
    for row in rows:
        env = row["environment"]
        assert env["device"] and torch.__version__.startswith(env["versions"]["torch"]) and "triton" in env["versions"]
        assert "commit" in env["git"] and "gpu" in env and row["command"] and row["mode"] == "eager"
        ms = row["step_ms"]
        assert 0 < ms["p10"] <= ms["median"] <= ms["p90"] and ms["count"] == 3
        assert row["bytes_per_step"] == row["weight_bytes"] + row["kv_bytes"] + row["draft_bytes"]
        share = row["bytes_per_step"] / (ms["median"] / 1e3) / (row["copy_gbs"] * 1e9)
        assert row["share_of_copy"] == pytest.approx(share, rel=0.02, abs=1e-4)
        alone = plain[row["shape"], row["quant"], row["context"]]
        assert row["break_even_tau"] == pytest.approx(ms["median"] / alone, rel=1e-3)
        fake = row["synthetic"]
        assert fake["tokens_per_second"] == pytest.approx(fake["given_tau"] / ms["median"] * 1e3, rel=1e-3)
        assert fake["label"].startswith("synthetic") and fake["given_tau"] == (4 if row["head"] else 1)
        assert row["host_gap_ms"] == pytest.approx(row["wall_ms"] - ms["median"], abs=1e-4)
        assert row["wall_steps"] >= 2 and 1 <= row["tau_of_random_weights"] < 2
        assert row["rows"]["target"] == row["nodes"] and bool(row["rows"]["draft"]) == bool(row["head"])
        if row["head"]:
            split = row["split_ms"]
            assert split["draft"] > 0 and split["verify"] > 0
            whole = split["draft"] + split["verify"] + split["rest"]
            assert whole == pytest.approx(ms["median"], abs=1e-3) and row["draft_bytes"] > 0 and split["how"]
        memory = row["memory"]
        assert memory["tensors"] > row["weight_bytes"] / 2 and memory["plan"] > 0 and memory["peak"] is None
    wide = next(row for row in rows if row["nodes"] == 16)
    assert wide["rows"]["draft"] == [9, *[8] * 7]  # D + 1 rows to extend, then seven levels of eight


def test_a_finished_cell_is_skipped_and_a_broken_line_is_survived(measured, tmp_path, capsys):
    """make gpu-full measuring everything again after an interruption, or stopping at the half-written last line; old
    figures standing in for another commit's."""
    path = tmp_path / "steps.jsonl"
    kept = measured.read_text().splitlines()[:-2]
    path.write_text("\n".join(kept) + '\n{"type": "step_time", "key": "tin')
    assert command.main(["--json", str(path), *TINY, "--only", "tiny-moe"]) == 0
    assert "2 cells to measure, 0 done" in capsys.readouterr().out
    rows = cells(path)
    assert len(rows) == len(kept) + 2 and {r["shape"] for r in rows[-2:]} == {"tiny-moe"}
    assert rows[-1]["break_even_tau"]  # the plain cell of the same run is its baseline
    assert command.main(["--json", str(path), *TINY]) == 0
    assert "0 cells to measure, 10 done" in capsys.readouterr().out and len(cells(path)) == len(rows)
    other = tmp_path / "other.jsonl"
    arguments = ["--json", str(other), "--done", str(path), *TINY, "--only", "tiny half | plain"]
    assert command.main(arguments) == 0 and not other.exists()
    text = path.read_text()
    path.write_text(text.replace('"commit": "', '"commit": "x').replace('"commit": null', '"commit": "x"'))
    assert command.main(arguments) == 0 and len(cells(other)) == 2


def test_a_failing_cell_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch):
    """One shape that does not fit ending the whole run, or leaving no trace; its failure repeated for ever."""
    path, real = tmp_path / "steps.jsonl", step_cells.random_model

    def no_room(config, quant, device, dtype):
        if quant == "int4":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nsecond line")
        return real(config, quant, device, dtype)

    monkeypatch.setattr(step_cells, "random_model", no_room)
    assert command.main(["--json", str(path), *TINY]) == 1
    rows = cells(path)
    assert len(rows) == 10
    for row in rows:
        assert ("error" in row) == (row["quant"] == "int4") == ("step_ms" not in row)
    failed = next(row for row in rows if "error" in row)
    assert failed["error"] == "eager: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert command.main(["--json", str(path), *TINY, "--skip-failed"]) == 1 and len(cells(path)) == 10
    monkeypatch.setattr(step_cells, "random_model", real)
    assert command.main(["--json", str(path), *TINY]) == 0
    assert {row["key"] for row in cells(path) if "step_ms" in row} == {c.key for c in step_cells.tiny_cells()}


def test_a_way_to_run_that_takes_too_long_is_given_up_for_the_next(tmp_path, monkeypatch):
    """Minutes of compilation eating the whole budget, in every cell again; a second way that is never tried."""
    path, asked = tmp_path / "steps.jsonl", []

    def slow(self, cell, mode):
        asked.append(mode)
        if mode == "engine":
            time.sleep(60)

    monkeypatch.setattr(step_cells.Builder, "engine", slow)
    arguments = ["--json", str(path), *TINY, "--run", "engine", "graph", "--cell-seconds", "0.3"]
    monkeypatch.setattr(step_run, "measure", lambda cell, engine, *_: fake_row())
    assert command.main([*arguments, "--only", "plain"]) == 0
    rows = cells(path)
    assert [row["mode"] for row in rows] == ["graph"] * 4 and asked == ["engine", *["graph"] * 4]
    assert "OutOfTime" in rows[0]["problems"]["engine"] and "not tried" in rows[1]["problems"]["engine"]


def test_slow_compilation_comes_after_the_sure_figures(tmp_path, monkeypatch):
    """Half of the time budget compiling, nothing to show; or quick compilation, and the figures that users get left
    out. The engine's own figure must join the captured one, not be skipped for it."""
    path, env = tmp_path / "steps.jsonl", environment(torch.device("cpu"))
    args = command.build_parser().parse_args(["--json", str(path), *TINY])
    slow = {"type": "start", "cache": "cold", "environment": env, "first_request_s": 80.0}
    other = slow | {"first_request_s": 8.0, "environment": env | {"device": "another"}}
    killed = {"type": "start", "cache": "cold", "error": "killed after 75 s"}
    monkeypatch.setattr(step_run, "on_gpu", lambda device: True)

    def passes(*lines):
        return step_run.ways(args.run, torch.device("cuda"), list(lines), env)

    assert passes() == passes(slow) == passes(other) == passes(killed) == [["graph"], ["engine"]]
    assert passes(slow, slow | {"first_request_s": 8.0}) == [["engine", "graph"]]
    monkeypatch.setattr(step_run, "on_gpu", lambda device: False)
    assert passes() == [["eager"]]
    monkeypatch.setattr(step_run, "ways", lambda *_: [["graph"], ["engine"]])
    monkeypatch.setattr(step_cells.Builder, "engine", lambda self, cell, mode: mode)
    monkeypatch.setattr(step_run, "measure", lambda cell, engine, *_: fake_row())
    arguments = ["--json", str(path), *TINY, "--only", "tiny half"]
    assert command.main(arguments) == 0 and [r["mode"] for r in cells(path)] == ["graph"] * 4 + ["engine"] * 4
    assert all(row["break_even_tau"] == 1 for row in cells(path))
    assert command.main(arguments) == 0 and len(cells(path)) == 8
    assert gpu_report.table(cells(path)).count("| tiny |") == 4  # one row per cell: the later line's
    monkeypatch.setattr(step_run, "measure", mock.Mock(side_effect=RuntimeError("cannot be captured")))
    path.write_text("".join(json.dumps(row) + "\n" for row in cells(path)[:4]))
    assert command.main(arguments) == 0  # every cell has a figure, if not from the engine
    assert [row.get("error") for row in cells(path)[4:]] == ["engine: RuntimeError: cannot be captured"] * 4


def fake_row() -> dict:
    ms = {"median": 2.0, "p10": 1.9, "p90": 2.2, "count": 3}
    return {"step_ms": ms, "wall_ms": 2.1, "bytes_per_step": 10**6, "split_ms": None}


def test_a_dead_device_ends_the_process_with_its_own_code(tmp_path, monkeypatch):
    """An illegal access in one cell turning every later cell into a failure."""
    path = tmp_path / "steps.jsonl"
    monkeypatch.setattr(step_run, "measure", mock.Mock(side_effect=RuntimeError("illegal memory access")))
    monkeypatch.setattr(step_run, "usable", lambda device: False)
    assert command.main(["--json", str(path), *TINY]) == step_run.POISONED
    assert len(cells(path)) == 1 and "illegal memory access" in cells(path)[0]["error"]


def test_after_a_dead_device_the_next_way_is_tried(tmp_path, monkeypatch):
    """The restarted process killing the device with the same cell in the same way, until its attempts are used up."""
    path, dead = tmp_path / "steps.jsonl", []
    monkeypatch.setattr(step_cells.Builder, "engine", lambda self, cell, mode: mode)

    def measure(cell, mode, *_):
        if mode == "engine":
            dead.append(cell.key)
            raise RuntimeError("illegal memory access")
        return fake_row()

    monkeypatch.setattr(step_run, "measure", measure)
    monkeypatch.setattr(step_run, "usable", lambda device: False)
    arguments = ["--json", str(path), *TINY, "--run", "engine", "graph", "--only", "tiny-moe"]
    assert command.main(arguments) == step_run.POISONED
    assert command.main([*arguments, "--skip-failed"]) == step_run.POISONED
    assert command.main([*arguments, "--skip-failed"]) == 0
    rows = cells(path)
    assert len(dead) == len(set(dead)) == 2  # each cell killed the device once
    assert [row.get("mode") for row in rows] == [None, "graph", None, "graph"]
    assert rows[1]["problems"] == {"engine": "failed in an earlier run"}


def test_starts_and_bandwidth_write_their_lines(tmp_path):
    """The cold start counting from the wrong moment, or a line that goals() cannot read."""
    path = tmp_path / "steps.jsonl"
    begin = time.time() - 100
    assert command.main(["--json", str(path), *TINY, "--bandwidth"]) == 0
    assert command.main(["--json", str(path), *TINY, "--start", "cold", "--since", str(begin)]) == 0
    environment, start = read_json_lines(path)
    assert environment["type"] == "environment" and environment["copy_gbs"] > 0
    assert start["cache"] == "cold" and start["imports_s"] > 100 and start["second_request_s"] > 0
    parts = start["imports_s"] + start["build_s"] + start["first_request_s"]
    assert start["total_s"] == pytest.approx(parts, abs=0.5)


@pytest.mark.parametrize("arguments,message", [
    (["--device", "cpu"], "--device cpu needs --tiny"), (["--device", "cuda"], "no CUDA device here"),
    ([*TINY, "--only", "zebra"], "no cell's name contains 'zebra'"), ([*TINY, "--steps", "1"], "at least 2"),
])  # fmt: skip
def test_usage_errors(arguments, message, tmp_path, capsys):
    """A traceback, or an empty run that looks like success."""
    with pytest.raises(SystemExit) as error:
        command.main(["--json", str(tmp_path / "x"), *arguments])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_the_cells_are_those_that_the_issue_names():
    """A tree, a context or a shape missing from the run that cannot be repeated soon."""
    quick, full = step_cells.quick_cells(), step_cells.full_cells()
    wanted = {(q, n, c) for q in ("", "int4") for n in (1, 16, 24, 60) for c in (128, 2048)}
    assert {(c.quant, c.nodes, c.context) for c in quick} == wanted and len(quick) == 22
    assert [(c.quant, c.nodes) for c in quick if c.overlap] == [("int4", n) for n in (1, 60, 24, 16)]
    assert not kernels.can_overlap(torch.device("cpu"))
    assert [c.sampling for c in quick if c.sampling] == ["T=1", "T=1 top-p 0.9"] and not any(c.sampling for c in full)
    assert {c.shape for c in quick} == {"llama-3-8b"} and {c.head for c in quick if c.nodes > 1} == {3}
    assert [(c.quant, c.nodes) for c in quick[:8:2]] == [("", 1), ("", 60), ("int4", 1), ("int4", 60)]
    assert len({c.key for c in quick + full}) == len(quick + full)
    shapes = {(c.shape, c.quant) for c in full}
    assert {
        ("llama-2-7b", "int4"),
        ("llama-2-13b", "int4"),
        ("llama-2-70b", "int4"),
        ("mixtral-8x7b", "int4"),
    } <= shapes
    assert {"int8"} <= {c.quant for c in full} and {8, 32} <= {c.nodes for c in full}
    assert 8192 in {c.context for c in full} and {c.head for c in full if c.shape == "llama-2-7b"} == {0, 1}
    for cell in quick + full:
        assert cell.nodes == (trees.parse_tree(cell.tree).N if cell.tree else 1)
        assert cell.ctx >= cell.context + cell.nodes + 40
        plain = (cell.shape, cell.quant, cell.context, cell.ctx)
        before = quick + full
        assert any(
            (c.shape, c.quant, c.context, c.ctx) == plain and not c.head for c in before[: before.index(cell) + 1]
        )


# ---- real shapes, without memory ---------------------------------------------------------------------------


@pytest.fixture
def fake_gpu(monkeypatch):
    """Builds cells on fake CUDA tensors."""
    pytest.importorskip("triton", reason="a GPU's backend is Triton")
    with fake_gpu_cells(monkeypatch) as builder:
        yield builder


@pytest.mark.parametrize("name,gigabytes", [
    ("llama-3-8b half | plain | 1 nodes | context 128", (14.9, 15.2)),
    ("llama-3-8b int4 | eagle3-int4 dynamic:60,7,10 | 60 nodes | context 2048", (4.0, 7.5)),
    ("llama-2-7b int8 | eagle1-int8 paper25 | 26 nodes | context 128", (6.6, 9.5)),
    ("mixtral-8x7b int4 | plain | 1 nodes | context 128", (6.4, 7.3)),
])  # fmt: skip
def test_real_shapes_build_and_step_on_a_fake_gpu(fake_gpu, name, gigabytes):
    """A shape, dtype or layout that only the real model has: a head that does not fit its target, an unpacked weight."""
    cell = next(c for c in step_cells.quick_cells() + step_cells.full_cells() if c.key == name)
    engine = fake_gpu.engine(cell, "eager")
    step_time.pin(engine, cell.context)
    with torch.inference_mode(), engine.backend.active(), OneDevice():
        out = decode_step(engine.model, engine.drafter, engine.state, SamplingParams().mode)
    assert out.emitted.shape == (1, engine.drafter.D + 1) and engine.drafter.N == cell.nodes
    low, high = gigabytes
    assert low < step_bytes(engine, cell.context) / 1e9 < high
    weights = engine.model.weight_bytes(8 if "mixtral" in name else 1)
    assert step_time.planned(engine) > 0.9 * weights
    if cell.quant:
        assert engine.model.layers[0].attention.qkv.packed.layout == "planes"
        assert engine.model.layers[0].attention.qkv.qweight is None  # one copy of the weights


@pytest.mark.parametrize("quant", ["", "int4", "int8"])
def test_random_weights_of_a_deep_model_stay_finite(quant):
    """Activations that grow layer by layer until fp16 overflows: the 70B shape has 80 layers and no trained norms."""
    config = replace(
        random_models.SHAPES["tiny"], hidden_size=128, intermediate_size=256, num_hidden_layers=80, windows=()
    )
    with torch.no_grad():
        model = random_models.random_model(config, quant, torch.device("cpu"), torch.float32)
        kv, n = model.new_cache(1, 40), torch.zeros(1, dtype=torch.int64)
        nodes = model.nodes(n, torch.arange(8)[None], model_module.chain_ancestors(1, 8, "cpu"), 40)
        hidden, taps = model(torch.arange(8)[None] * 31, nodes, kv, (2, 40, 80))
        logits = model.logits(hidden)
        assert torch.isfinite(logits).all() and 0.3 < logits.std() < 3
        assert taps.abs().max() < 1000 and kv.abs().max() < 100  # far from fp16's 65504
        head = random_models.random_head(model, 3, quant)
        assert 0.2 < head.predict(head.fuse(taps)).std() < 5


# ---- the CUDA calls ----------------------------------------------------------------------------------------


def test_the_cuda_timing_code_uses_the_api_as_it_is(monkeypatch):
    """A misspelt or changed torch.cuda call, found only on the GPU: autospecced doubles accept real signatures alone."""
    calls = []
    for name in ("synchronize", "empty_cache", "max_memory_allocated", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.create_autospec(getattr(torch.cuda, name), return_value=7))
    for name in ("Event", "CUDAGraph", "Stream", "current_stream", "stream", "graph"):
        double = mock.create_autospec(getattr(torch.cuda, name))
        monkeypatch.setattr(torch.cuda, name, double)
    torch.cuda.Event.return_value.elapsed_time.return_value = 1.5
    device = torch.device("cuda")
    assert timing.captured(print, torch.device("cpu")) is print
    replay = timing.captured(lambda: calls.append("call"), device)
    assert len(calls) == 3 and torch.cuda.graph.call_count == 1  # two to warm up, one captured
    replay()
    samples = timing.times(replay, device, 4, lambda: calls.append("before"))
    assert samples == [1.5] * 4 and calls.count("before") == 4
    assert torch.cuda.CUDAGraph.return_value.replay.call_count == 5
    assert torch.cuda.Event.return_value.record.call_count == 8
    step_cells.free(device)
    assert torch.cuda.empty_cache.call_count == 1
    seconds = kernel_timing.measure([lambda: calls.append("kernel")] * 3, device, 2)
    assert seconds == pytest.approx(1.5e-3 / 3) and calls.count("kernel") == 9
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=RuntimeError("illegal memory access")))
    assert not step_run.usable(device) and step_run.usable(torch.device("cpu"))


class Event:
    """torch.cuda.Event on the host's clock."""

    def __init__(self, enable_timing=False, external=False):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.mark.parametrize("broken", [False, True])
def test_what_only_a_gpu_runs_is_run_here_too(tmp_path, monkeypatch, broken):
    """A name that does not exist in the lines that a CPU run skips; an extra that fails costing the cell its time."""
    path = tmp_path / "steps.jsonl"
    for module in (step_cells, step_run, step_time, timing):
        monkeypatch.setattr(module, "on_gpu", lambda device: True)
    monkeypatch.setattr(step_time, "captured", lambda call, device: call)
    monkeypatch.setattr(step_time, "gpu_state", lambda device: {"clocks.sm": 1.0})
    state = {"synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "max_memory_allocated": 5}
    for name, value in (state | {"get_device_name": "fake"}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(step_run, "copy_bandwidth", lambda device: 1e9)
    if broken:
        for module, name in ((step_time, "split"), (step_time, "planned"), (step_run, "launches")):
            double = mock.Mock(side_effect=RuntimeError("not on this build"))
            monkeypatch.setattr(module, name, double)
    arguments = ["--json", str(path), *TINY, "--run", "graph", "--only", "tiny int4"]
    assert command.main(arguments) == 0
    rows, counted = cells(path), [line for line in read_json_lines(path) if line["type"] == "launches"]
    assert [row["mode"] for row in rows] == ["graph"] * 4 and all("captured here" in row["how"] for row in rows)
    assert all(row["memory"]["peak"] == 5 and row["gpu"] == {"clocks.sm": 1.0} for row in rows)
    assert [("error" in line) for line in counted] == [broken] * 3  # the last cell, then the first of both kinds
    assert [line["key"] for line in counted] == [rows[i]["key"] for i in (3, 0, 1)]
    assert all(row["share_of_copy"] > 0 for row in rows)
    if broken:
        assert rows[1]["split_ms"] is None and "not on this build" in rows[1]["notes"]["split"]
        assert rows[0]["memory"]["plan"] is None and rows[0]["notes"]["planned"].startswith("RuntimeError")
    else:
        assert rows[1]["split_ms"]["verify"] > 0 and counted[0]["graphs"] == 0


def test_the_engines_own_graph_is_timed_where_it_has_one(monkeypatch):
    """A graph captured by the script timed in place of the one that users run, or the host gap of a loop that ran
    something else; an option that this Engine does not have."""
    graph, device = mock.Mock(), types.SimpleNamespace(type="cuda")
    engine = mock.Mock(spec=Engine)
    engine.model, engine.graph.return_value = types.SimpleNamespace(device=device), None
    monkeypatch.setattr(step_time, "captured", lambda call, device: call)
    mode = SamplingParams().mode
    call, how = step_time.step_call(engine, mode)
    call()
    assert "captured here" in how and engine.step.call_count == 1
    row = step_time.finish(fake_row() | {"how": how}, step_cells.tiny_cells()[0], 1e9, None, 4.0)
    assert row["host_gap_ms"] is None
    engine.graph.return_value = graph
    call, how = step_time.step_call(engine, mode)
    call()
    assert graph.replay.call_count == 1 and engine.step.call_count == 1 and how == "the engine's CUDA graph"


@pytest.mark.parametrize("mode,compiled,captures", [
    ("engine", True, ("parts", None, True)), ("graph", True, ("", None, True)), ("eager", False, None),
])  # fmt: skip
def test_every_way_to_run_is_one_that_the_engine_has(mode, compiled, captures):
    """An option that this Engine does not have, or one whose meaning has changed."""
    given = step_cells.engine_options(mode)
    inspect.signature(EngineConfig).bind_partial(**given)
    how = LoadOptions(eagle="head", **given)
    how.check()
    assert how.compile == compiled and how.eagle_always
    assert captures is None or COMPILE_MODES[how.compile_mode] == captures


@pytest.mark.parametrize("cuda", [False, True])
def test_a_step_that_marks_its_phases_is_split_by_its_marks(monkeypatch, cuda):
    """Phases of an uncompiled draft subtracted from a compiled step, where the engine could have said; the first
    replay's events read in place of each replay's own."""
    for module in (step_time, timing):
        monkeypatch.setattr(module, "on_gpu", lambda device: cuda)
    monkeypatch.setattr(step_time, "captured", lambda call, device: call)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(step_time, "pin", lambda engine, context: None)

    def step(mode, mark):
        for phase, seconds in (("draft", 0.02), ("verify", 0.05), ("accept", 0.01)):
            time.sleep(seconds)
            mark(phase)

    engine = types.SimpleNamespace(step=step, model=types.SimpleNamespace(device=torch.device("cpu")))
    cell = step_cells.tiny_cells()[2]
    found = step_time.split(engine, cell, 3, 100.0)
    assert found["how"] == "marked inside the step" and 20 <= found["draft"] < found["verify"] < 100
    monkeypatch.setattr(step_time, "parts", lambda engine: (lambda: time.sleep(0.001), lambda: time.sleep(0.002)))
    engine.step = lambda *_: 1 / 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):  # parts alone would be those of a greedy step
        step_time.split(engine, replace(cell, sampling="T=1"), 3, 100.0)
    alone = step_time.split(engine, cell, 3, 100.0)
    assert alone["how"].startswith("draft and verify timed alone; ZeroDivisionError") and 1 <= alone["draft"] < 20
    assert found["verify"] >= 50
    assert found["rest"] == pytest.approx(100 - found["draft"] - found["verify"], abs=1e-3)


def test_launches_are_counted(monkeypatch):
    """Graph launches and host-launched kernels mixed up: 'one launch per step' would be proven by a typo."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    names = [("cudaGraphLaunch", cpu), ("cudaLaunchKernel", cpu), ("cuLaunchKernelEx", cpu), ("cudaMemcpyAsync", cpu)]
    events = [types.SimpleNamespace(name=n, device_type=d) for n, d in [*names, ("kernel", cuda), ("kernel", cuda)]]
    recorded = mock.MagicMock()
    recorded.__enter__.return_value.events.return_value = events
    monkeypatch.setattr("torch.profiler.profile", lambda activities: recorded)
    found = step_time.launches(lambda: None)
    assert found.pop("by_name") == {"kernel": 2}
    assert found == {"graphs": 1, "kernels_from_host": 2, "device_activities": 2}


# ---- scripts.gpu -------------------------------------------------------------------------------------------


def test_a_part_is_killed_with_its_children_and_keeps_its_output(tmp_path):
    """A hung compile worker outliving its part and holding the GPU; the log of a killed part lost."""
    marker = tmp_path / "alive"
    child = f"import time; time.sleep(3); open({str(marker)!r}, 'w')"
    code = "import subprocess, sys, time; print('so far', flush=True)"
    code += f"; subprocess.Popen([sys.executable, '-c', {child!r}])"
    log = tmp_path / "log"
    part = gpu.Part("hang", [sys.executable, "-c", code + "; time.sleep(60)"], 1)
    ended = gpu.run_part(part, log, 1.5)
    assert ended["exit"] == "killed after 2 s" or ended["exit"].startswith("killed") and ended["seconds"] < 5
    assert "so far" in log.read_text()
    time.sleep(3.2)
    assert not marker.exists()


def test_a_part_is_started_again_where_it_asks_for_it(tmp_path):
    """A dead CUDA context ending the step times for good, or being restarted for ever."""
    code = "import sys; sys.exit(0 if '--skip-failed' in sys.argv else 3)"
    part = gpu.Part("steps", [sys.executable, "-c", code, "{seconds}", "{now}"], 60, retry=3)
    ended = gpu.run_part(part, tmp_path / "log", 60)
    assert ended["exit"] == 0 and ended["attempts"] == 2
    assert (
        gpu.run_part(gpu.Part("x", [sys.executable, "-c", "raise SystemExit(3)"], 60), tmp_path / "log", 60)["exit"]
        == 3
    )


def test_the_parts_fit_the_promise(tmp_path):
    """make gpu taking more than eight minutes; a part that takes files or options that do not exist."""
    args = types.SimpleNamespace(full=False, tiny=False, only=[])
    found = gpu.parts(args, tmp_path, "gpu", str(tmp_path / "cache"))
    names = [part.name for part in found]
    assert sum(part.seconds for part in found) <= 455  # and this process's own start
    order = ["bandwidth", "tilings", "tests", "cold", "warm", "steps", "kernels", "dram", "peers", "demo"]
    assert names == order and "272" not in str(found)
    by_name = dict(zip(names, found, strict=True))
    assert by_name["cold"].env == by_name["warm"].env != {} and "tests/test_kernels_gpu.py" in str(
        by_name["tests"].command
    )
    parsers = {"step_time": command.build_parser(), "bench_kernels": bench_kernels.build_parser()}
    for part in found:
        module = part.command[2].removeprefix("scripts.")
        if module in parsers:
            words = [word.replace("{seconds}", "9").replace("{now}", "9") for word in part.command[3:]]
            parsers[module].parse_args(words)
    assert (
        sum(
            part.seconds
            for part in gpu.parts(types.SimpleNamespace(full=True, tiny=False, only=[]), tmp_path, "g", "c")
        )
        > 3600
    )


def test_make_gpu_runs_here_on_small_shapes(tmp_path):
    """The whole command failing in its plumbing on the day there is a GPU."""
    command = [sys.executable, "-m", "scripts.gpu", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--only", "bandwidth", "peers"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    summary = json.loads((tmp_path / "cpu-tiny-summary.json").read_text())
    assert [(p["part"], p["exit"]) for p in summary["parts"]] == [("bandwidth", 0), ("peers", 0)]
    assert len(read_json_lines(tmp_path / "cpu-tiny-steps.jsonl")) == 1
    declined = read_json_lines(tmp_path / "cpu-tiny-kernels.jsonl")
    assert {line["kernel"] for line in declined} == {"torchao", "gemlite"}
    assert all("skipped" in line or "us" in line for line in declined)
    assert "unmeasured (goal >= 0.85)" in done.stdout


def test_finished_parts_of_a_full_run_are_kept(tmp_path):
    """make gpu-full spending its minutes on the tests again and again; another commit's tests counting for this one."""
    env = {"device": "G", "versions": {"torch": "1"}, "git": {"commit": "a"}}
    parts = [{"part": p, "exit": e} for p, e in (("tests", 0), ("steps", 0), ("demo", 1), ("memcheck", 0))]
    (tmp_path / "s.json").write_text(json.dumps({"environment": env, "parts": parts}))
    files = [tmp_path / "s.json", tmp_path / "none.json"]
    assert set(gpu.finished(files, env)) == {"tests", "memcheck"}
    assert gpu.finished(files, env | {"git": {"commit": "b"}}) == {}


def line(quant="", tree="", head_quant="", context=128, ms=5.0, **more) -> dict:
    cell = step_cells.Cell("llama-3-8b", quant, 3 if tree else 0, head_quant, tree, 60 if tree else 1, context, 2176)
    env = {"device": "NVIDIA H100", "gpu": {"power.limit": 700.0, "driver_version": "580"}, "git": {"commit": "abc"}}
    env["versions"] = {"torch": "2.11", "triton": "3.6"}
    row = {
        "type": "step_time",
        "key": cell.key,
        **vars(cell),
        "environment": env,
        "dtype": "bfloat16",
        "mode": "engine",
    }
    row |= fake_row() | {"step_ms": {"median": ms, "p10": ms, "p90": ms, "count": 3}, "wall_ms": ms} | more
    return step_time.finish(row, cell, 3e12, 5.0, 4.0)


def test_goals_are_judged_by_the_figures():
    """A missed goal printed as met, or one without figures printed at all."""
    split = {"draft": 1.0, "verify": 5.4, "rest": 0.1}
    rows = [
        line(ms=5.0, bytes_per_step=15 * 10**9),
        line(tree="dynamic:60,7,10", head_quant="int8", ms=6.5, split_ms=split),
    ]
    rows += [
        {"type": "start", "cache": "cold", "total_s": 70.0, "key": "llama-3-8b"},
        {"type": "launches", "error": "x"},
    ]
    text = gpu_report.goals(rows)
    assert text[0].startswith("  ok") and "1.000" in text[0]
    assert text[1].startswith("  ok") and "1.080" in text[1] and text[2].startswith("  ok")
    assert text[4] == "  ?    tok/s at tau 3.91, 7-chain: unmeasured (goal >= 455)"
    assert text[5].startswith("  ok") and "943.08" in text[5]  # 6.13 / 6.5 ms
    assert text[6].startswith("  MISS cold") and "unmeasured" in text[8] and "unmeasured" in text[9]
    greedy = line("int4", "dynamic:60,7,10", "int4", ms=5.0)
    assert "unmeasured" in gpu_report.goals([greedy])[8]
    filtered = greedy | {"sampling": "T=1 top-p 0.9", "step_ms": greedy["step_ms"] | {"median": 6.0}}
    assert gpu_report.goals([greedy, filtered])[8].startswith(
        "  MISS int4 step of 60 nodes with top-p over a greedy one: 1.2"
    )


def test_kernel_goals_are_judged_over_all_layers():
    """A peer that skipped its slowest layer winning; a share averaged over layers instead of weighted by time."""

    def timed(kernel, m, layer, us, gbs):
        where = {"model": "llama-3-8b", "device": "NVIDIA H100", "copy_gbs": 3000.0}
        return where | {"kernel": kernel, "m": m, "layer": layer, "us": us, "gbs": gbs}

    rows = [timed("int4", m, layer, us, 2000.0) for m, more in ((1, 0), (16, 2), (32, 4)) for layer, us in
            (("qkv", 10.0 + more), ("down", 30.0))]  # fmt: skip
    rows += [timed("cublas", m, layer, 50.0, 1.0) for m in (16, 32) for layer in ("qkv", "down")]
    rows += [timed("tinygemm", 16, "qkv", 1.0, 1.0), {"model": "llama-3-8b", "kernel": "gemlite", "skipped": "absent"}]
    text = gpu_report.kernel_goals(rows)
    assert text[0] == "  ok   int4 at 1 rows, share of copy bandwidth: 0.667 (goal >= 0.65)"
    assert text[2].startswith("  ?    int8") and "unmeasured" in text[5]
    assert text[4] == "  ok   int4 at 16 rows over 1 row: 1.050 (goal <= 1.1)"
    assert text[6] == "  ok   int4 at 16 rows over cublas: 0.420 (goal <= 1)"
    rows.append(timed("tinygemm", 16, "down", 20.0, 1.0))
    assert gpu_report.kernel_goals(rows)[6] == "  MISS int4 at 16 rows over tinygemm: 2.000 (goal <= 1)"
    assert all("unmeasured" in line for line in gpu_report.kernel_goals([]))
    dram = {"model": "llama-3-8b", "kernel": "int4-gated", "dram_read": 110, "dram_written": 30, "weight_bytes": 100}
    moved = gpu_report.kernel_goals([dram | {"m": 32}])
    assert "unmeasured" in moved[-2] and moved[-1].startswith("  MISS DRAM bytes of the gate-up at 32 rows")
    slow = [timed("int4", 1, "qkv", 10.0, 3000.0), timed("int4", 1, "down", 90.0, 1000.0)]
    assert "0.400" in gpu_report.kernel_goals(slow)[0]  # 120 MB in 100 us, not the mean of 1.0 and 0.33


def test_the_readme_table_comes_from_committed_lines(tmp_path):
    """A figure in the README that no committed file holds; a table without device, or one that names small shapes."""
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- gpu -->\nold\n<!-- /gpu -->\nafter\n")
    assert gpu.main(["--readme", str(page), "--results", str(tmp_path)]) == 0
    assert "unmeasured" in page.read_text() and "old" not in page.read_text()
    append_json_lines(tmp_path / "h100-steps.jsonl", line(ms=9.0))
    append_json_lines(tmp_path / "h100-steps.jsonl", line(ms=5.0, bytes_per_step=12 * 10**9))
    append_json_lines(tmp_path / "h100-steps.jsonl", line() | {"shape": "tiny", "key": "tiny"})
    gpu.readme(page, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- /gpu -->\nafter\n")
    assert "NVIDIA H100 at 700.0 W, driver 580, torch 2.11, triton 3.6, commit abc" in text
    assert "| 5.000 (5.000 to 5.000) | 80% |" in text and "9.000" not in text and "tiny" not in text


def test_the_results_page_has_its_block():
    """`--readme docs/results.md` failing on the day there is something to write."""
    text = (ROOT / "docs" / "results.md").read_text()
    assert text.count("<!-- gpu -->\n") == 1 and text.count("<!-- /gpu -->") == 1


def test_kernel_benchmark_resumes_and_survives_its_peers(tmp_path, monkeypatch, capsys):
    """A peer whose error is of a new kind ending the run; a cast timed as part of a peer; finished cells timed again."""
    path, asked = tmp_path / "k.jsonl", []
    real = kernel_timing.make_kernel

    def make(name, *rest):
        asked.append(name)
        if name == "gemlite":
            raise AssertionError("a peer's own way of failing")
        return real(name, *rest)

    monkeypatch.setattr(kernel_timing, "make_kernel", make)
    arguments = [
        "--device",
        "cpu",
        "--quick",
        "--dtype",
        "float32",
        "--models",
        "llama-3-8b",
        "--m",
        "1",
        "--json",
        str(path),
    ]
    arguments += ["--resume", "--kernels", "int4", "gemlite"]
    assert bench_kernels.main(arguments) == 0
    rows = read_json_lines(path)
    assert all(("us" in row) == (row["kernel"] == "int4") for row in rows) and len(rows) == 10
    assert rows[1]["skipped"] == "AssertionError: a peer's own way of failing"
    asked.clear()
    assert bench_kernels.main(arguments) == 0 and set(asked) == {"gemlite"}
    asked.clear()
    arguments[arguments.index(str(path))] = str(tmp_path / "new.jsonl")
    assert bench_kernels.main([*arguments, "--done", str(path)]) == 0 and set(asked) == {"gemlite"}
    asked.clear()
    arguments[arguments.index("1")] = "2"
    assert bench_kernels.main([*arguments, "--done", str(path)]) == 0 and set(asked) == {"int4", "gemlite"}
    for name, dtype in (("tinygemm", torch.bfloat16), ("int4", torch.float32)):
        op = mock.Mock(side_effect=lambda x, *_: x)
        monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", lambda codes, tiles: codes, raising=False)
        monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm", op, raising=False)
        functions, takes = real(name, 64, 128, torch.float32, torch.device("cpu"), 2)
        size = kernel_timing.weight_bytes(name, 64, 128, torch.float32)
        assert takes == dtype and len(functions) == 2
        assert size == 64 * 128 // 2 + (2 if name == "int4" else 4) * 64
        if name == "tinygemm":
            x = torch.zeros(1, 128, dtype=takes)
            assert functions[0](x) is x  # nothing but the peer's own kernel runs


def test_dram_bytes_are_read_from_the_profiler_s_table(monkeypatch):
    """A thousands separator or a unit read wrongly; a profiler that may not count taken for zero bytes."""
    table = '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    table += '"0","linear_kernel","dram__bytes_read.sum","Mbyte","60.50"\n'
    table += '"0","linear_kernel","dram__bytes_write.sum","byte","1,024"\n'
    assert list(kernel_timing.read_counters(table).values()) == [60.5e6, 1024]
    assert kernel_timing.read_counters("==ERROR== ERR_NVGPUCTRPERM") == {}
    device = torch.device("cuda")
    monkeypatch.setattr(kernel_timing.shutil, "which", lambda name, path: None)
    absent = kernel_timing.dram_bytes("llama-3-8b", (1, 32), torch.float16, device)
    assert absent[0]["skipped"] == "Nsight Compute (ncu) is not installed"
    monkeypatch.setattr(kernel_timing.shutil, "which", lambda name, path: "ncu")
    answers = iter([table, "==ERROR== ERR_NVGPUCTRPERM - no permission"])
    run = mock.Mock(side_effect=lambda *_, **__: types.SimpleNamespace(stdout=next(answers), stderr="", returncode=0))
    monkeypatch.setattr(kernel_timing.subprocess, "run", run)
    first, second = kernel_timing.dram_bytes("llama-3-8b", (1, 32), torch.float16, device)
    assert (first["dram_read"], first["dram_written"], first["m"]) == (60500000, 1024, 1)
    assert first["weight_bytes"] == 28672 * 4096 // 2 + 2 * 28672 * 4096 // 128
    assert "NVGPUCTRPERM" in second["skipped"] and "profiled(28672, 4096, 1" in run.call_args_list[0].args[0][-1]


def test_tuning_writes_as_it_goes_and_goes_on(tmp_path, monkeypatch, capsys):
    """A time limit that loses every tiling; a layer timed in another form than the model runs it."""
    gpu_facts = types.SimpleNamespace(name="G", multi_processor_count=82, major=8, minor=6, L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu_facts)
    monkeypatch.setattr(kernel_timing, "random_weight", lambda kind, *rest: kind)
    seen = []

    def measure(calls, device, repeats):
        seen.append((calls[0].keywords["gated"], *sorted(call.args[0].shape[0] for call in calls)))
        return 1.0

    monkeypatch.setattr(kernel_timing, "measure", measure)
    monkeypatch.setattr(kernel_timing, "rotating", lambda size, device: 1)
    monkeypatch.setattr(kernel_timing, "layers", lambda model: {"gate_up": (256, 128), "down": (128, 128)})
    path, cpu = tmp_path / "t.json", torch.device("cpu")
    kernel_timing.tune_device(["m"], torch.float32, cpu, 1, path, False, seconds=-1.0)
    assert not path.exists() and "4 shapes keep their default tilings" in capsys.readouterr().out
    kernel_timing.tune_device(["m"], torch.float32, cpu, 1, path, False)
    assert len(read_json(path)["gpus"]["G"]) == 4 and set(seen) == {(True, 1, 16, 32), (False, 1, 16, 32)}
    seen.clear()
    kernel_timing.tune_device(["m"], torch.float32, cpu, 1, path, False, resume=True)
    assert not seen
