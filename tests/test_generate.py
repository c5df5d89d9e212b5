"""The command line and `load`, as a user runs them, on the embedded demo model."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import held, held_out_prompts, needs_triton

import generate
import kernels
from cli import prove
from decoding.params import SamplingParams
from decoding.snapshots import remembered
from engine.load import fit_chunk, use_threads
from engine.results import acceptance
from generate import load, main
from kernels import cpu
from loading.drafting import DraftFiles
from loading.memory import chunk_bytes, plan_memory
from loading.options import DEMO, LoadOptions
from support import cache
from weights.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parent.parent
HEADS = sorted(p.name for p in DEMO.glob("eagle*") if p.is_dir())
EAGLE = ["--eagle", str(DEMO / "eagle1")]
# The keys of --json. Other programs read them: one may be added, none renamed or dropped.
ROW = """text token_ids prompt_tokens cached_tokens new_tokens stop_reason prefill_seconds decode_seconds
tokens_per_second steps tokens_per_step plain_steps plain_tokens nodes_per_step drafted_nodes tau accepted_by_depth
chain n_alpha temperature seed logprobs prompt_logprobs""".split()
RUN = """template settings settings_of_model
checkpoint quant lora dtype device drafter tree eagle draft_checkpoint medusa ngram_nodes verify kernels compile
compile_mode break_even_tau compile_seconds graphs_reused graphs_compiled peak_memory_bytes versions
ranks plan_bytes_per_rank exchanges layers_in_parts""".split()


def run(capsys, *flags: str) -> tuple[int, str, str]:
    try:
        code = main(["--ctx", "512", *flags])
    except SystemExit as stop:  # of the parser
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def json_of(capsys, *flags: str) -> dict:
    """The object that --json prints."""
    return json.loads(run(capsys, "--json", *flags)[1])


def test_the_main_job_writes_text_to_stdout_and_the_report_to_stderr(capsys):
    """Without flags the text is on stdout, and every line of the report is on stderr; with -q there is no report."""
    code, out, err = run(capsys, "--max-new-tokens", "24")
    assert code == 0 and out.startswith("def read_file") and len(out) > 120
    assert "tok/s" not in out
    for word in ("model ", "device ", "plan ", "prompt ", "generate ", "speed ", "memory ", "stop ", "length"):
        assert word in err, word
    assert run(capsys, "-q", "--max-new-tokens", "24") == (0, out, "")
    assert os.environ.get("EAGLET") is None  # behaviour never hides in the environment


def test_json_is_one_object_with_every_field(capsys):
    """--json prints one object with exactly the known keys, and the values are those of the run."""
    code, out, err = run(capsys, "--json", "--max-new-tokens", "9", "-p", "import os\n")
    result = json.loads(out)
    assert code == 0 and err == "" and set(result) == {*ROW, *RUN}
    assert result["new_tokens"] == 9 == len(result["token_ids"]) == 1 + sum(map(len, result["tokens_per_step"]))
    assert result["stop_reason"] == "length" and result["tau"] == 1.0
    assert [result[name] for name in ("drafter", "tree", "eagle", "verify", "compile_mode")] == [None] * 5
    flags = [*EAGLE, "--tree", "chain:3", "--batch-size", "2", "--gauge", "--quant", "int8", "--kernels", "reference"]
    result = json_of(capsys, "--max-new-tokens", "9", *flags)
    assert set(result) == {*ROW, *RUN, "batch", "gauge_ms"} and [set(row) for row in result["batch"]] == [set(ROW)] * 2
    assert set(result["gauge_ms"]) == {"draft", "verify", "accept", "host", "step"}
    chosen = dict(drafter="eagle", tree="chain:3", eagle=EAGLE[1], verify="match", chain=3, dtype="float32")
    assert (chosen | {"quant": "int8 (rounded at load)"}).items() <= result.items()


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def instruct_model(folder: Path) -> Path:
    """The demo model with a chat template."""
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        shutil.copy(DEMO / name, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def test_a_prompt_is_a_message_to_an_instruct_model(tmp_path, capsys):
    """With a chat template the prompt is a message with the rest of the context for its answer; --raw continues it as
    text."""
    flags = ["--checkpoint", str(instruct_model(tmp_path)), "-p", " why? "]
    encode = load(tmp_path, ctx=64).tokenizer.encode
    output = json_of(capsys, *flags, "--ctx", "64")
    assert output["prompt_tokens"] == len(encode("<user>why?\n<assistant>", False))
    assert output["template"] == "tokenizer_config.json"
    assert output["settings"]["max_new_tokens"] == 64 - output["prompt_tokens"]
    flags += ["--max-new-tokens", "2"]
    system = json_of(capsys, *flags, "--system", "be brief")
    assert system["prompt_tokens"] == len(encode("<system>be brief\n<user>why?\n<assistant>", False))
    builtin = json_of(capsys, *flags, "--template", "vicuna")
    assert builtin["template"] == "built-in vicuna" and builtin["new_tokens"] == 2
    code, out, err = run(capsys, *flags)
    assert code == 0 and "why?" not in out and "as a message to the model (--raw" in err
    code, out, err = run(capsys, *flags, "--raw")
    assert code == 0 and out.startswith(" why? ") and "continued as plain text" in err
    raw = json_of(capsys, *flags[:-2], "--raw", "--stop", "\n")
    assert raw["prompt_tokens"] < output["prompt_tokens"] and raw["settings"]["max_new_tokens"] == 200
    assert raw["template"] is None and raw["stop_reason"] == "stop" and "\n" not in raw["text"]


def test_every_setting_that_affects_the_text_is_reported(capsys):
    """The last line of the report names a bias, the least length and a grammar, which no other line shows."""
    err = run(capsys, "--max-new-tokens", "4", "--min-new-tokens", "2", "--logit-bias", "5=-1.5")[2]
    assert err.endswith("T 0  min-new-tokens 2  logit-bias 5=-1.5\n")
    assert run(capsys, "--max-new-tokens", "4", "--grammar", 'start: "a"')[2].endswith("T 0  grammar\n")


def test_the_model_s_own_settings_apply_and_are_reported(tmp_path, capsys):
    """generation_config.json decides what no flag does, the report names it, and a bad file is an error."""
    flags = ["--checkpoint", str(instruct_model(tmp_path)), "-p", "x", "--max-new-tokens", "3"]
    drawn = {"eos_token_id": 2, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(drawn))
    output = json_of(capsys, *flags)
    assert (output["temperature"], output["settings"]["top_p"]) == (0.7, 0.9)
    assert output["settings_of_model"] == ["temperature", "top_p"]
    assert "T 0.7  top-p 0.9  (T, top-p: the model's generation_config.json)" in run(capsys, *flags)[2]
    assert "T 0.7  (T: the model's generation_config.json)" in run(capsys, *flags, "--top-p", "1")[2]
    err = run(capsys, *flags, "--temperature", "0")[2]
    assert err.endswith("seed 0  T 0\n") and "generation_config" not in err
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": -1}')
    code, _, err = run(capsys, *flags)
    assert code == 2 and "error  generation_config.json: temperature is -1" in err


def test_a_prompt_may_come_from_a_pipe(capsys, monkeypatch):
    """A pipe is the prompt, with and without `-f -`; an empty one is an error. Where a container, cron or CI gives no
    stdin, but /dev/null or a closed one, the built-in prompt is decoded."""

    def fed(stdin, *flags: str) -> tuple[int, str, str]:
        """main() with a pipe of this text, or with a file or nothing, as its stdin."""
        if isinstance(stdin, str):
            read, write = os.pipe()
            os.write(write, stdin.encode())
            os.close(write)
            stdin = os.fdopen(read)
        monkeypatch.setattr(sys, "stdin", stdin)
        return run(capsys, "--max-new-tokens", "4", *flags)

    for flags in (["--json"], ["--json", "-f", "-"]):
        assert '"prompt_tokens": 7' in fed("def f(x):\n", *flags)[1]
    assert fed("", "-q") == (2, "", "error  standard input: it is empty; give a prompt, like -p TEXT.\n")
    assert fed("", "-f", "-") == (2, "", "error  --prompt-file -: it is empty; give a prompt.\n")
    with open(os.devnull) as null:
        for stdin in (null, None):
            code, out, _ = fed(stdin)
            assert code == 0 and out.startswith(generate.DEMO_PROMPT)


def test_help_and_version_need_no_torch():
    """--help and --version work without importing torch."""
    code = "import sys, generate; generate.main(['--version']); print(generate.build_parser().format_help())"
    command = [sys.executable, "-c", code + "; assert 'torch' not in sys.modules"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("eaglet ") and "--checkpoint" in done.stdout, done.stderr


def test_prompt_ids_need_no_tokenizer(tmp_path, capsys):
    """Without tokenizer files --prompt-ids gives ids, and a text is an error that names --prompt-ids."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO / name, tmp_path)
    code, out, _ = run(capsys, "--checkpoint", str(tmp_path), "--prompt-ids", "1,5,17", "--max-new-tokens", "4", "-q")
    assert code == 0 and len([t for t in out.strip().split(",") if t]) == 4
    code, _, err = run(capsys, "--checkpoint", str(tmp_path), "-p", "x")
    assert code == 3 and "--prompt-ids" in err


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--checkpoint", "no/such/dir"], 3, "no/such/dir"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--prompt-ids", "1,x"], 2, "comma-separated"),
        (["--prompt-ids", "1,999999"], 2, "vocabulary"),
        (["--prompt-ids", ""], 2, "empty"),
        (["-p", "a", "--prompt-ids", "1"], 2, "one of"),
        (["--prompt-file", "no/such/file"], 3, "no/such/file"),
        (["--max-new-tokens", "5000"], 2, "512 allocated"),
        (["-p", "x" * 100_000], 2, "characters"),
        (["--prove"], 2, "--eagle"),
        (["--tree", "bogus"], 2, "'bogus' is not one of paper25"),
        ([*EAGLE, "--tree", "chain:99"], 2, "chain length 99"),
        ([*EAGLE, "--tree", "auto"], 2, "--eagle " + str(DEMO / "eagle1")),
        (["--drafter", "ngram", "--tree", "auto"], 2, "needs --eagle"),
        (["--html", "no/such/dir/page.html"], 2, "no/such/dir/page.html: there is no folder"),
        (["--checkpoint", "x" * 300], 3, "File name too long"),
        (["--eagle", str(DEMO / "eagle4")], 3, "no such folder or file"),
        ([*EAGLE, "--draft-vocab", "2"], 2, "the drafter knows 2 tokens"),
        ([*EAGLE, "--draft-vocab", "3", "--tree", "dynamic:16,4,4"], 2, "narrower --tree"),
        pytest.param(["--kernels", "triton"], 2, "TRITON_INTERPRET", marks=needs_triton),
        (["--ctx", "100000"], 2, "ctx"),
        (["--batch-size", "0"], 2, "batch-size"),
        ([*EAGLE, "--draft-vocab-text", "f"], 2, "--draft-vocab K"),
        (["--template", "vicuna", "--prompt-ids", "1"], 2, "-p TEXT"),
        (["--template", "vicuna", "-p", "x", "--raw"], 2, "without --raw"),
        (["--system", "be brief", "-p", "x"], 2, "choose --template vicuna"),
        (["--chat", "--raw"], 2, "--raw"),
        (["--chat"], 2, "choose --template vicuna"),
        (["--chat", "--html", "f.html"], 2, "--html"),
        (["--chat", "--batch-size", "2"], 2, "--batch-size"),
        (["--show-tree", "--batch-size", "2"], 2, "--show-tree"),
        (["--threads", "1000000000"], 2, "allowed: 1 to 4096"),
        ([*EAGLE, "--verify", "multi-round", "--tree", "dynamic:16,4,4"], 2, "multi-round"),
        ([*EAGLE, "--verify", "multi-round", "--prove"], 2, "multi-round"),
        (["--tp", "0"], 2, "--tp: '0'; allowed: 1 or more."),
        (["--slots", "-1"], 2, "--slots: '-1'; allowed: 0 or more."),
        (["--threads", "two"], 2, "--threads: 'two'; allowed: 1 or more."),
        (["--prompt", "", "-p=b"], 2, "give one of --prompt, --prompt-file"),
    ],
)
def test_errors_are_one_line_with_the_right_exit_code(flags, code, says, capsys):
    """Every wrong flag or file is one line that names it, with the documented exit code."""
    got, out, err = run(capsys, *flags)
    lines = [line for line in err.splitlines() if line.startswith("error")]
    assert got == code and len(lines) == 1 and says in lines[0] and "Traceback" not in err, err


def test_threads_hold_for_a_cpu_and_are_reported(capsys, monkeypatch):
    """--threads sets torch's threads for this run, the report names them, and a run on a GPU leaves them alone."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert ", 2 threads " in run(capsys, "--threads", "2", "--device", "cpu", "--max-new-tokens", "2")[2]
    assert torch.get_num_threads() == 2
    use_threads(LoadOptions(device="cuda"))
    assert torch.get_num_threads() == 2
    assert ", 1 threads " in run(capsys, "--device", "cpu", "--max-new-tokens", "2")[2]
    assert torch.get_num_threads() == 1


def test_what_was_asked_for_is_named(capsys):
    """The report says that the weights were rounded at load, and names --verify multi-round, which is not refused where
    it works."""
    flags = ["--quant", "int8", "--verify", "multi-round", "--temperature", "1", "--max-new-tokens", "8"]
    code, out, err = run(capsys, *EAGLE, *flags)
    assert code == 0 and out and "model   demo   int8 (rounded at load)  float32   " in err and "multi-round" in err


def test_a_plan_that_does_not_fit_names_the_change_that_does(capsys, monkeypatch):
    """A plan that does not fit is exit code 4 and names a --ctx, or a --pool, that would."""
    for free, words, hint in (
        (20_000_000, ["--ctx", "2048", "--slots", "4"], r"Try --ctx (\d+)"),
        (30_000_000, ["--ctx", "2048", "--slots", "4", "--pool", "8000"], r"Try --pool (\d+)"),
    ):
        monkeypatch.setattr("engine.load.free_memory", lambda device, free=free: free)
        code = main(words)
        err = capsys.readouterr().err
        assert code == 4 and re.search(hint, err), err
    assert main([*words[:-1], re.search(hint, err)[1], "-p", "hi", "--max-new-tokens", "1", "-q"]) == 0


@pytest.mark.parametrize("kv", ["auto", "model", "int8"])
def test_plan_matches_what_the_engine_allocates(kv):
    """The plan is within 5 % of the bytes held, with and without a head, and with keys that are rounded."""
    eagle = [{"eagle": str(DEMO / head), "eagle_always": on} for head in HEADS[:1] for on in (True, False)]
    for options in ({}, *(eagle if kv == "model" else ())):
        engine = load(DEMO, ctx=1024, kv=kv, **options)
        dim = engine.model.config.head_dim
        halves = engine.backend.mode == "cpu"  # the demo's checkpoint has 16 bits
        row = {"auto": 2 * dim if halves else 4 * dim, "model": 4 * dim, "int8": dim + 4}[kv]
        assert engine.state.kv[0][0, 0, 0, 0, 0].nbytes == row
        kept = held(engine.model) + sum(buffer.nbytes for buffer in engine.state.buffers())
        kept += held(engine.head) + engine.drafter.cache.nbytes if options else 0
        copied = sum(part.nbytes for part in remembered(engine.state, engine.drafter, 0))
        assert engine.plan.snapshots == pytest.approx(engine.prefill.most * copied, rel=0.2)
        assert abs((engine.plan.total - engine.plan.snapshots) / kept - 1) < 0.05
        assert (engine.state.history.numel() > 0) == (options.get("eagle_always") is False)
    assert engine.plan.buffers > engine.state.history.nbytes + engine.state.ring.nbytes


@pytest.mark.skipif(bool(cpu.problem()), reason=cpu.problem())
@pytest.mark.parametrize("kv", ["float16", "bfloat16", "int8"])
def test_a_cache_that_rounds_changes_no_token(kv):
    """Catches a node that attends to its own or its parent's keys before they are rounded. As history they are."""
    plain = load(DEMO, ctx=512, kv=kv, quant="int8")
    more = {"slots": 2, "eagle_always": True}
    drafting = load(DEMO, ctx=512, kv=kv, quant="int8", eagle=str(DEMO / "eagle3"), prune=10, **more)
    prompt = plain.tokenizer.encode("def add(a, b):\n    return a + b\n\n\nclass ")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature, seed=3, max_new_tokens=48)
        want = plain.generate(prompt, params).run()[0].token_ids
        got = drafting.generate_batch([prompt, prompt[:9]], params).run()
        assert got[0].token_ids == want and got[0].tau > 1.1
        assert drafting.generate(prompt, params).run()[0].cached_tokens > 0  # kept keys have the same bits
        assert drafting.generate(prompt, params).run()[0].token_ids == want


def test_same_seed_same_text_and_batch_rows_draw_with_their_own_seed(capsys):
    """Equal seeds give equal ids, other seeds others, and row b of a batch those of seed + b."""
    flags = ["--max-new-tokens", "12", "--temperature", "1", "--seed", "5"]
    one, again, other = (json_of(capsys, *flags[:-1], seed) for seed in "556")
    both = json_of(capsys, *flags, "--batch-size", "2")
    assert one["token_ids"] == again["token_ids"] != other["token_ids"]
    assert [r["token_ids"] for r in both["batch"]] == [one["token_ids"], other["token_ids"]]


def test_ctrl_c_prints_the_report_and_exits_130(tmp_path):
    """Ctrl-C while decoding keeps the text, prints the report and exits with 130."""
    command = [sys.executable, "generate.py", "--max-new-tokens", "1800", "--ctx", "2048", "--stop-ids", "4095"]
    command += ["-p", "def read_file("]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.read(len("def read_file") + 150)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=25)
    assert first.startswith("def read_file") and process.returncode == 130, err
    assert "interrupted" in err and "tok/s" in err and "Traceback" not in err


FORKS = [((0.0625, 1.0), False, 0), ((0.0625, 3.0), False, 1), ((5e-5, 90.0), False, 0), ((5e-5, 1.0), True, 1)]


@pytest.mark.parametrize(("margin", "bitwise", "verdict"), FORKS)
def test_prove_judges_a_fork_by_the_dtype_s_precision(margin, bitwise, verdict, capsys, monkeypatch):
    """A fork within 2 ulp or 1e-4 is a tie with exit code 0, unless all widths have the same bits; any other is a bug
    with 1."""
    forked = prove.Proof(18, 60, prove.Fork(0, 18, *margin), bitwise)
    monkeypatch.setattr(prove, "prove", lambda *args: forked)
    code, _, err = run(capsys, "--eagle", str(DEMO / "eagle1"), "--prove", "--max-new-tokens", "4")
    assert code == verdict and "fork at token 18 of row 0, 18/60 identical" in err
    assert f"{margin[1]:.1f} ulp in float32" in err and ("this is a bug" in err) == bool(verdict)


def test_a_fork_s_margin_in_units_of_the_last_place():
    """The margin is the logits' distance, and its unit the last place of the larger one in the model's dtype."""
    engine = load(dtype="bfloat16", ctx=256)
    prompt = engine.tokenizer.encode("def f(x):")
    with torch.inference_mode(), engine.backend.active():
        logits = engine.prefill.logits(0, prompt, SamplingParams().mode)[0][0, 0]
    a, b = logits.topk(2).indices.tolist()
    distance, ulps = engine.margin(prompt, len(prompt), SamplingParams(), a, b)
    above = torch.nextafter(logits[a].bfloat16(), torch.tensor(1e9, dtype=torch.bfloat16)).float()
    assert distance == pytest.approx(float(logits[a] - logits[b]))
    assert ulps == pytest.approx(distance / float(above - logits[a]))


@pytest.mark.parametrize(
    "head, flags", [*zip(HEADS, ("", "--temperature 1 --seed 3 --tree dynamic:16,4,4"), strict=True)]
)
def test_prove_replays_without_the_head(head, flags, capsys):
    """--prove says "identical 48/48" for every demo head, greedy, or sampled with a dynamic tree."""
    flags += f" --eagle {DEMO / head} --prove --max-new-tokens 48 --dtype float64"
    code, _, err = run(capsys, *flags.split())
    assert code == 0 and "identical 48/48" in err


@pytest.mark.parametrize("head", HEADS)
def test_demo_heads_reach_their_floor(head):
    """tau of every demo head on held-out prompts is at least the floor stored with it."""
    floor = json.loads((DEMO / "floors.json").read_text())[head]
    engine = load(DEMO, eagle=str(DEMO / head), tree="paper25", ctx=512, eagle_always=True)
    prompts = held_out_prompts(engine.tokenizer, 4, 96)
    for temperature, least in (("0", floor["greedy"]), ("1", floor["sampled"])):
        params = SamplingParams(temperature=float(temperature), seed=1, max_new_tokens=64)
        results = [engine.generate(p, params).run()[0] for p in prompts]
        assert acceptance([len(ids) for result in results for ids in result.tokens_per_step])[0] >= least, temperature


def test_the_page_and_the_trees_hold_every_token(tmp_path, capsys):
    """The page's and the terminal's steps hold the tokens of plain decoding, without colours in a pipe, and --json
    stays JSON."""
    page = tmp_path / "steps.html"
    flags = [*EAGLE, "--max-new-tokens", "32", "--show-tree", "--html", str(page)]
    code, out, _ = run(capsys, *flags)
    text = page.read_text()
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script', text, re.S)[1])
    engine = load(DEMO, ctx=512)
    prompt = engine.tokenizer.encode(generate.DEMO_PROMPT)
    plain = engine.generate(prompt, SamplingParams(max_new_tokens=32)).run()[0]
    shown = data["first"] + "".join(t for step in data["steps"] for t in step["kept"])
    assert code == 0 and shown == plain.text and generate.DEMO_PROMPT in data["prompt"]
    assert [name for name, _ in data["facts"]][:3] == ["model", "head", "tree"]
    assert "http" not in text.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert out.endswith(plain.text + "\n") and "\033" not in out
    for number, step in enumerate(data["steps"], 1):
        assert step["ms"] > 0 and f"step {number}: {len(step['kept'])} token" in out
    code, out, err = run(capsys, *flags, "--json")
    assert code == 0 and json.loads(out)["text"] == plain.text and "step 1: " in err


def test_draft_vocabulary_can_be_trimmed_and_counted():
    """A head with 1,024 draft ids gives the tokens of plain decoding, and its drafts are accepted."""
    plain = load(DEMO, ctx=256, dtype="float64")
    prompt = plain.tokenizer.encode(generate.DEMO_PROMPT)
    params = SamplingParams(max_new_tokens=40)
    expected = plain.generate(prompt, params).run()[0].token_ids
    options = {"draft_vocab": 1024, "dtype": "float64", "ctx": 256, "eagle_always": True}  # tau is measured
    for text in (None, str(ROOT / "tree.py")):
        engine = load(DEMO, eagle=EAGLE[1], draft_vocab_text=text, **options)
        result = engine.generate(prompt, params).run()[0]
        assert engine.head.vocab_size == 1024 and result.token_ids == expected and result.tau > 1.2


@pytest.mark.parametrize("flags", [{}, pytest.param({"eagle": EAGLE[1]}, marks=pytest.mark.slow)])
def test_the_compile_flag_itself_compiles_once(flags, monkeypatch):
    """Other prompts, lengths, seeds and settings do not recompile after --compile, and the tokens equal those of eager
    decoding."""
    # Inductor knows its C++ code by a hash of all that it is made from. It is kept, as it takes a compiler 10 seconds.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache.folder() / "tests"))
    options = {"ctx": 256, "tree": "chain:2", "eagle_always": True, "device": "cpu", "kernels": "reference"} | flags
    compiled, eager = (load(DEMO, compile=compile, **options) for compile in (True, False))
    prompts = [compiled.tokenizer.encode(t) for t in ("import os\n", "class A:\n    def f(self):\n", "x" * 200)]

    def request(i: int) -> SamplingParams:
        return SamplingParams(temperature=0.5 + 0.2 * i, top_p=0.9 - 0.1 * i, seed=i, max_new_tokens=8 + i)

    compiled.generate(prompts[0], request(0)).run()
    assert compiled.compile_seconds > 0.1
    with torch.compiler.set_stance("fail_on_recompile"):
        for i, prompt in enumerate(prompts):
            ours = compiled.generate(prompt, request(i)).run()[0].token_ids
            assert ours == eager.generate(prompt, request(i)).run()[0].token_ids


def test_compile_on_a_cpu_keeps_the_cpp_kernels(capsys):
    """With --compile a CPU runs the C++ kernels, and one line says that they need no compilation. The flag took them
    away: the command that people use most compiled for half a minute and then decoded at a tenth of the speed."""
    flags = ["--max-new-tokens", "8", "--device", "cpu"]
    plain, asked = json_of(capsys, *flags), json_of(capsys, *flags, "--compile")
    assert asked["token_ids"] == plain["token_ids"] and asked["kernels"] == plain["kernels"]
    assert asked["compile"] is (kernels.cpu_problem() != "")
    if not asked["compile"]:
        engine = load(DEMO, compile=True, device="cpu", report=(notes := []).append)
        assert engine.backend.mode == "cpu" and not engine.config.compile and not engine.compiled
        assert [note for note in notes if "nothing to compile" in note]


def test_report_and_json_say_when_speculation_does_not_pay(capsys, monkeypatch):
    """The break-even, both step times and the plain tokens are reported, tau counts drafted steps only, and
    --eagle-always and --prove decode without the fallback."""
    monkeypatch.setattr("engine.engine.Engine._measure", lambda self, mode, view: (5e-3, 45e-3))
    flags = [*EAGLE, "--max-new-tokens", "90", "--dtype", "float64"]
    code, _, err = run(capsys, *flags)
    line = next(line for line in err.splitlines() if line.startswith("drafting pays above"))
    assert code == 0 and "break-even tau 9.00 (plain 5.0 ms, speculative 45.0 ms)" in line
    output = json_of(capsys, *flags)
    assert f"{output['plain_tokens']} tokens decoded plainly" in line and 0 < output["plain_tokens"] < 100
    assert output["break_even_tau"] == pytest.approx(9) and len(output["tokens_per_step"]) == output["steps"]
    drafted = output["steps"] - len(output["plain_steps"])
    assert 0 < drafted < output["steps"] and f"over {drafted} of {output['steps']} steps" in err
    assert output["tau"] == pytest.approx((89 - output["plain_tokens"]) / drafted) and output["tau"] > 2
    code, _, err = run(capsys, *flags, "--prove", "--max-new-tokens", "12")
    assert code == 0 and "drafting" not in err
    always = json_of(capsys, *flags, "--eagle-always")
    assert always["token_ids"] == output["token_ids"] and always["plain_tokens"] == 0
    assert always["break_even_tau"] is None


@pytest.mark.skipif(bool(cpu.problem()), reason="the CPU kernels do not run here")
def test_the_report_speaks_of_pruning_only_where_trees_were_pruned(capsys):
    """Catches a limit that is named although filters had the whole tree drafted."""
    flags = [*EAGLE, "--max-new-tokens", "20", "--temperature", "1", "--eagle-always"]
    assert "nodes drafted a step" in run(capsys, *flags)[2]
    assert "nodes drafted a step" not in run(capsys, *flags, "--top-p", "0.9")[2]


def test_the_widest_part_of_a_prompt_is_what_memory_has_room_for(monkeypatch):
    """Parts that do not fit beside what the plan holds, ranks that read parts of different widths, and a plan without
    them. A CPU keeps to narrow ones. The plan has memory for graphs only with --compile on a GPU, and as many times more
    as the step has rows."""
    checkpoint, options = Checkpoint.open(DEMO), LoadOptions(ctx=256, device="cuda")
    config, plan = checkpoint.config, plan_memory(checkpoint, DraftFiles(), options)

    def graphs(**options) -> int:
        return plan_memory(checkpoint, DraftFiles(), LoadOptions(ctx=256, **options)).graphs

    assert graphs(compile=True, device="cpu") == graphs(device="cuda") == 0
    assert graphs(compile=True, device="cuda", compile_mode="reduce-overhead") == 0
    one, many = graphs(compile=True, device="cuda"), graphs(compile=True, device="cuda", drafter="ngram")
    assert one >= 4 * config.vocab_size and many == 26 * one  # paper25: as many rows of logits

    def widest(room: int, options: LoadOptions = options, ranks: object = None) -> int:
        monkeypatch.setattr("engine.load.free_memory", lambda device: plan.total + room)
        chunk, counted = fit_chunk(config, plan, options, ranks)
        assert counted.total - plan.total == (chunk_bytes(config, chunk) if chunk > 256 else 0)
        return chunk

    needed = chunk_bytes(config, 1024)
    assert [widest(size) for size in (8 * needed, needed, needed - 1, 0)] == [2048, 1024, 512, 256]
    others = SimpleNamespace(size=2, heard=lambda own: [own, 512])
    assert widest(needed, ranks=others) == 512
    assert widest(8 * needed, LoadOptions(ctx=256, device="cpu")) == 256
