"""What a program does with an engine of two processes, for tests/test_ranks.py: it prints a JSON line of what it saw.

    python ranks_session.py requests | kill CHECKPOINT

`requests` sends one engine whole, abandoned, half-read and stopped requests, and a second engine without processes the
same whole ones. `kill` ends the second of four processes between two steps.
"""

import json
import os
import signal
import sys

from cli.prove import prove
from decoding.params import SamplingParams
from engine.load import load
from engine.ranks import RankLost
from loading.options import DEMO

OPTIONS = dict(dtype="float64", device="cpu", kernels="reference", ctx=256, threads=1)
PROMPT = list(range(40, 70))


def listening(pid: int) -> list[str]:
    """The addresses at which a process listens, in hexadecimal as Linux writes them."""
    sockets = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if entry.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/{pid}/net/{name}").readlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def requests() -> dict:
    several = load(DEMO, tp=2, slots=2, pool=300, eagle=str(DEMO / "eagle1"), **OPTIONS)
    alone = load(DEMO, eagle=str(DEMO / "eagle1"), eagle_always=True, **OPTIONS)
    sampled = SamplingParams(temperature=1.0, seed=4, max_new_tokens=24)
    texts = [[engine.generate(PROMPT, sampled).run()[0].token_ids for engine in (several, alone)]]
    with several.generate(PROMPT[::-1]) as stream:  # abandoned after its first step
        next(stream)
    old = several.generate(PROMPT)
    next(old)
    greedy = SamplingParams(max_new_tokens=16)
    texts += [[engine.generate(PROMPT[::-1], greedy).run()[0].token_ids for engine in (several, alone)]]
    texts += [[old.run()[0].token_ids, alone.generate(PROMPT).run()[0].token_ids]]
    stopped = several.generate(PROMPT * 3, SamplingParams(max_new_tokens=100))
    next(stopped)
    stopped.stop()
    stopped.run()
    results = several.generate(PROMPT, sampled).run()
    proof = prove(several, [PROMPT], sampled, results)
    pids = [os.getpid(), *(child.pid for child in several.ranks.children)]
    return {
        "texts": texts, "stopped": stopped.result.stop_reason, "identical": proof.identical,
        "addresses": sum(map(listening, pids), []), "pids": pids,
    }  # fmt: skip


def kill() -> dict:
    engine = load(sys.argv[2], tp=4, **OPTIONS | {"ctx": 160})
    stream = engine.generate(PROMPT, SamplingParams(max_new_tokens=100))
    next(stream)
    os.kill(engine.ranks.children[0].pid, signal.SIGKILL)
    try:
        stream.run()
    except RankLost as error:
        return {"error": str(error)}
    return {}


if __name__ == "__main__":
    print(json.dumps({"requests": requests, "kill": kill}[sys.argv[1]]()))
