"""What the commands do with `--tp N`: what works with several processes, what they say of them, and what is refused."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_ranks import ROOT, config_of, run

import generate
import quantize
from scripts import bench
from support.errors import UsageError
from weights.quantized import QuantSpec


def test_the_benchmark_knows_the_number_of_processes(tmp_path):
    """Arms that rank 0 builds and runs alone, for which it waits for ever; a record that hides the number of ranks."""
    words = ["--tp", "2", "--threads", "1", "--device", "cpu"]
    words += ["--temperature", "0", "--reps", "1", "--limit", "1", "--max-new-tokens", "6", "--warmup-runs", "1", "-q"]
    arm = ["--arm", "e1=eagle=eagle1;tree=chain:2", "--json", tmp_path / "lines"]
    done = run("-m", "scripts.bench", *words, *arm, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "lines").read_text().splitlines()[-1])
    assert summary["model"]["ranks"] == 2 and [arm["arm"] for arm in summary["arms"]] == ["plain", "e1"]
    assert summary["rows"][1]["speedup"]["median"] > 0  # which only arms with the tokens of plain decoding have


@pytest.mark.parametrize("words, world, message", [
    ([bench, "--tp", "2", "--baseline", "hf"], "", "leave --shape and --baseline out"),
    ([quantize, "--tp", "4"], "", "2 key and value heads cannot be divided among 4"),
    ([generate, "-p", "x", "--tp", "2"], "3", "torchrun started 3 processes"),
    ([generate, "-p", "x", "--tp", "3"], "", "heads cannot be divided among 3. This model can be split among 2."),
])  # fmt: skip
def test_what_does_not_go_with_several_processes_is_refused_at_once(words, world, message, capsys, monkeypatch):
    """Hours of quantizing before a --tp that cannot split the result, a benchmark whose ranks wait for ever, and a number
    of processes that shows only as a hang, or as an error of a tensor's shape."""
    command, *flags = words
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "0")
    assert command.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_groups_that_would_be_split_are_named_before_quantizing():
    """A model that is quantized for hours and then cannot be split."""
    quantize.check_split(config_of(), QuantSpec("int4", group_size=32), 4)
    with pytest.raises(UsageError, match=r"layers.0.attention.o.scales has 2 rows, .* 4 processes .* --group-size"):
        quantize.check_split(config_of(), QuantSpec("int4", group_size=64), 4)


def test_processes_on_several_machines_give_the_tokens_of_one(capsys):
    """Ranks that take the number in the whole group for that on their own machine, or wait where nobody comes."""
    words = ["--device", "cpu", "--threads", "1", "--eagle", "demo/eagle1", "--temperature", "0.7"]
    words += ["--max-new-tokens", "40", "--ctx", "256", "-q"]
    assert generate.main(words) == 0
    alone = capsys.readouterr().out
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    words = ["generate.py", *words, "--tp", "2"]
    groups = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *group, "--node-rank", number, *words],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in "01"
    ]  # fmt: skip
    outputs = [each.communicate(timeout=100) for each in groups]
    assert [each.returncode for each in groups] == [0, 0], outputs
    assert outputs[0][0] == alone and outputs[1][0] == "" and len(alone) > 40


def test_a_server_of_several_processes_says_what_it_keeps_and_ends_with_them():
    """Earlier prompts that are silently not kept, and a server that answers 500 for ever after a process has died."""
    httpx = pytest.importorskip("httpx")
    words = [sys.executable, *"-m scripts.serve --tp 2 --threads 1 --port 0 --device cpu -q".split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("serving"):
            break
    try:
        assert any("with --tp the last prompt is reused, and earlier ones are not kept" in line for line in lines)
        address = lines[-1].split()[1] + "/completions"
        assert httpx.post(address, json={"prompt": "def", "max_tokens": 2}, timeout=30).status_code == 200
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        answer = httpx.post(address, json={"prompt": "def", "max_tokens": 2}, timeout=30)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "rank_lost"
        assert process.wait(30) == 5
    finally:
        process.kill()
        process.stderr.close()
