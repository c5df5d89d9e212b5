"""Two servers, a trainer and `generate.py` on one cache folder: every text is the right one.

`EAGLET_TOGETHER=600 pytest -s tests/test_together.py` sends random requests for so many seconds, and prints how many
texts were compared.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decoding.params import SamplingParams
from engine.load import load
from loading.options import DEMO
from support.texts import read_source, stdlib_files

SECONDS = float(os.environ.get("EAGLET_TOGETHER", 0))
ROOT = Path(__file__).resolve().parent.parent
SERVE = (
    "-m scripts.serve --port 0 --device cpu --threads 1 -q --keep-prompt-cache --prompt-cache-mb 1 --ctx 512".split()
)
TRAIN = """-m scripts.train_eagle --version 1 --steps 4 --batch 2 --length 48 --eval-prompts 1 --eval-tokens 8 --threads 1
    --prompt-length 16 --device cpu --force""".split()


class Together:
    """The processes that share a cache folder, and what each of them ought to say."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = os.environ | {"EAGLET_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.engine = load(DEMO, ctx=512, device="cpu", threads=1)
        ids = self.engine.tokenizer.encode(read_source(stdlib_files()[1][0]), add_bos=False)
        cut = self.engine.tokenizer.decode
        # Texts that share their beginnings, so that one request finds what an earlier one left.
        self.prompts = [cut(ids[at : at + size]) for at in (0, 0, 0, 400, 400, 900) for size in (40, 150, 300)]
        (folder / "text.txt").write_text(cut(ids[:3000]))
        self.known: dict[tuple, str] = {}
        self.compared = 0
        self.servers: list[tuple[subprocess.Popen, str]] = []
        self.trainer: subprocess.Popen | None = None
        self.trained = 0

    def start(self, *words: object, **more) -> subprocess.Popen:
        command = [sys.executable, *map(str, words)]
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, text=True, **more)

    def serve(self, number: int) -> tuple[subprocess.Popen, str]:
        """A server that listens, and its address."""
        head = ["--eagle", DEMO / "eagle3"] if number else []
        process = self.start(*SERVE, "--checkpoint", DEMO, *head, stderr=subprocess.PIPE)
        lines = iter(process.stderr.readline, "")
        return process, next(line.split()[1] for line in lines if line.startswith("serving"))

    def expected(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        key = prompt, tokens, temperature, seed
        if key not in self.known:
            stops = self.engine.stop_ids(SamplingParams())
            params = SamplingParams(temperature, max_new_tokens=tokens, seed=seed, stop_ids=stops)
            self.known[key] = self.engine.generate(self.engine.tokenizer.encode(prompt), params).run()[0].text
        return self.known[key]

    def request(self, rng: random.Random) -> None:
        """Ask one of the servers or, at times, generate.py, and compare the text."""
        httpx = pytest.importorskip("httpx")
        ask = rng.choice(self.prompts), rng.choice([8, 24]), rng.choice([0.0, 1.0]), rng.randrange(3)
        prompt, tokens, temperature, seed = ask
        if rng.random() < 0.1:
            words = ["--checkpoint", DEMO, "-p", prompt, "--max-new-tokens", tokens, "--temperature", temperature]
            words += ["--seed", seed, "--ctx", 512, "--device", "cpu", "--threads", 1, "--json"]
            done = self.start("generate.py", *words, stdout=subprocess.PIPE).communicate(timeout=300)[0]
            text = json.loads(done)["text"]
        else:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": seed}
            _, address = rng.choice(self.servers)
            answer = httpx.post(f"{address}/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["text"]
        assert text == self.expected(*ask), ask
        self.compared += 1

    def train(self) -> None:
        """Begin a training where none is under way. The one before must have ended well."""
        if self.trainer is not None and self.trainer.poll() is None:
            return
        assert self.trainer is None or self.trainer.returncode == 0
        self.trained += self.trainer is not None
        places = ["--data", self.folder / "text.txt", "--out", self.folder / "head", "--work", self.folder / "work"]
        self.trainer = self.start(*TRAIN, "--checkpoint", DEMO, *places, stderr=subprocess.DEVNULL)

    def restart(self, number: int) -> None:
        """End a server, which keeps its prompts, and start it again."""
        process, _ = self.servers[number]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, 143, -signal.SIGTERM)
        process.stderr.close()
        self.servers[number] = self.serve(number)

    def end(self) -> None:
        for process in [self.trainer, *(process for process, _ in self.servers)]:
            if process is not None:
                process.kill()
                process.wait()


@pytest.mark.skipif(not SECONDS, reason="EAGLET_TOGETHER=600 sends requests for ten minutes")
def test_processes_that_share_a_cache_folder_give_the_right_texts(tmp_path):
    """Every text of both servers, which restart at times, and of generate.py is that of plain decoding, while a trainer
    runs beside them."""
    pytest.importorskip("uvicorn")
    rng = random.Random(SECONDS)
    together = Together(tmp_path)
    ends = time.monotonic() + SECONDS
    restarts = 0
    try:
        together.servers = [together.serve(0), together.serve(1)]
        while time.monotonic() < ends:
            together.train()
            together.request(rng)
            if together.compared % 40 == 0:
                together.restart(restarts % 2)
                restarts += 1
    finally:
        together.end()
    print(f"\n{together.compared} texts, {restarts} restarts of a server, {together.trained} trainings")
