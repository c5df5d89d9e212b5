"""What a program does with an engine of four processes, for tests/test_ranks.py: it prints a JSON line of what it saw.

    python ranks_session.py FOLDER

It sends the engine whole, abandoned, half-read and stopped requests, and an engine without processes the same whole ones.
Then it ends the second process between two steps. FOLDER holds the model `llama` and its head `eagle3`.
"""

import json
import os
import signal
import sys
from pathlib import Path

from cli.prove import prove
from cli.report import ranks_json
from decoding.params import SamplingParams
from engine.load import load
from engine.ranks import RankLost

FOLDER = Path(sys.argv[1])
OPTIONS = dict(dtype="float64", device="cpu", kernels="reference", ctx=160, threads=1, eagle=FOLDER / "eagle3")
PROMPT = list(range(40, 70))


def listening(pid: int) -> list[str]:
    """The addresses at which a process listens, in hexadecimal as Linux writes them."""
    sockets = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if entry.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/{pid}/net/{name}").readlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def main() -> dict:
    several = load(FOLDER / "llama", tp=4, slots=2, pool=200, **OPTIONS)
    alone = load(FOLDER / "llama", eagle_always=True, **OPTIONS)
    sampled = SamplingParams(temperature=1.0, seed=4, max_new_tokens=12)
    texts = [[engine.generate(PROMPT, sampled).run()[0].token_ids for engine in (several, alone)]]
    with several.generate(PROMPT[::-1]) as stream:  # abandoned after its first step
        next(stream)
    some = SamplingParams(max_new_tokens=20)
    old = several.generate(PROMPT, some)
    next(old)
    greedy = SamplingParams(max_new_tokens=8)
    texts += [[engine.generate(PROMPT[::-1], greedy).run()[0].token_ids for engine in (several, alone)]]
    texts += [[old.run()[0].token_ids, alone.generate(PROMPT, some).run()[0].token_ids]]
    stopped = several.generate(PROMPT * 3, SamplingParams(max_new_tokens=60))
    next(stopped)
    stopped.stop()
    stopped.run()
    results = several.generate(PROMPT, sampled).run()
    proof = prove(several, [PROMPT], sampled, results)
    pids = [child.pid for child in several.ranks.children]
    seen = {
        "texts": texts, "stopped": stopped.result.stop_reason, "identical": proof.identical, "pids": pids,
        "addresses": sum(map(listening, [os.getpid(), *pids]), []), "facts": [*map(ranks_json, (several, alone))],
    }  # fmt: skip
    stream = several.generate(PROMPT, SamplingParams(max_new_tokens=100))
    next(stream)
    os.kill(pids[0], signal.SIGKILL)
    try:
        stream.run()
    except RankLost as error:
        seen["error"] = str(error)
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))
