"""llama.cpp and ik_llama.cpp on a GGUF file, from prebuilt wheels, in a process of their own (`bench.peers.NativeArm`).

    python -m bench.native_peers NAME FILE CTX THREADS CLIENTS [KIND HEAD TOKENS]

Their OpenMP threads wait busily, and so would slow down every other engine of the same process, and each other. The
process writes one JSON line about itself, and then an answer for every request, a JSON line on stdin. It has no torch.
"""

import importlib.metadata
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

# A request's prompts, how many new tokens, where it stops, and the settings of its sampling.
Request = dict[str, Any]


class LlamaCpp:
    """xllamacpp: llama.cpp's server, with a slot for each client."""

    def __init__(
        self, file: str, ctx: int, threads: int, clients: int, kind: str = "", head: str = "", tokens: str = ""
    ):
        """kind, head, tokens: how it drafts, with which GGUF file, and how many tokens at once."""
        import xllamacpp

        how = xllamacpp.CommonParams()
        how.model.path, how.n_ctx, how.n_parallel, how.warmup = file, ctx, clients, True
        how.cpuparams.n_threads = how.cpuparams_batch.n_threads = threads
        if kind:
            draft = how.speculative.draft
            name = f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind}"
            how.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
            draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = head, int(tokens), 0, 0.0
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(how)
        self.options = {"xllamacpp": xllamacpp.__version__, "built with": xllamacpp.get_system_info().strip(" |")}
        self.options |= {"drafts": int(tokens)} if kind else {}

    def run(self, request: Request) -> dict[str, Any]:
        """All prompts together, none of which reuses anything. The server tells texts, so there are no ids."""
        started = time.perf_counter()
        with ThreadPoolExecutor(len(request["prompts"])) as pool:
            answers = list(pool.map(partial(self._ask, request), request["prompts"]))
        arrivals = [[t - started for t in times] for times in answers]
        return {"ids": [[-1] * len(times) for times in arrivals], "arrivals": arrivals}

    def _ask(self, request: Request, prompt: list[int]) -> list[float]:
        """When the tokens of a prompt arrived: the first and the last one by the clock, those between evenly."""
        how = request["sampling"] | {"min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False, "stream": True}
        how |= {"prompt": prompt, "n_predict": request["tokens"], "ignore_eos": not request["stops"]}
        parts: list[tuple[float, dict[str, Any]]] = []
        self.server.handle_completions(how, lambda part: parts.append((time.perf_counter(), part)))
        timings = parts[-1][1]["timings"]
        return np.linspace(parts[0][0], parts[-1][0], int(timings["predicted_n"])).tolist()


class IkLlamaCpp:
    """ik-llama-cpp-python: llama.cpp with faster kernels for CPUs. It decodes one prompt, greedily.

    numpy finds the likeliest token, because the library's own sampler copies the vocabulary in Python.
    """

    def __init__(self, file: str, ctx: int, threads: int, clients: int):
        from ik_llama_cpp import llama

        self.lib, self.llama = llama, llama.IkLlama(file, n_ctx=ctx, n_threads=threads, verbose=False)
        self.options = {"ik-llama-cpp-python": importlib.metadata.version("ik-llama-cpp-python")}

    def run(self, request: Request) -> dict[str, Any]:
        """One greedy request from an empty cache."""
        (prompt,), context = request["prompts"], self.llama._context
        ids: list[int] = []
        arrivals: list[float] = []
        context.kv_cache_clear()
        started, size = time.perf_counter(), context._n_ubatch
        for i in range(0, len(prompt), size):
            last = i + size >= len(prompt)
            self._decode(self.lib.make_batch_range(prompt[i : i + size], pos_start=i, logits_last=last))
        while True:
            logits = self.lib.C.llama_get_logits_ith(context._ctx, -1)
            ids.append(int(np.ctypeslib.as_array(logits, (context._model.n_vocab,)).argmax()))
            arrivals.append(time.perf_counter() - started)
            if len(ids) == request["tokens"] or ids[-1] in request["stops"]:
                return {"ids": [ids], "arrivals": [arrivals]}
            self._decode(self.lib.make_batch_single(ids[-1], len(prompt) + len(ids) - 1))

    def _decode(self, batch: Any) -> None:
        if self.llama._context.decode(batch):
            raise RuntimeError("could not decode a batch")
        self.lib.C.llama_batch_free(batch)


ENGINES = {"llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlamaCpp}


def main(name: str, file: str, ctx: str, threads: str, clients: str, *head: str) -> None:
    """Load the model, and answer until stdin ends."""
    said = sys.stdout
    sys.stdout = sys.stderr  # for what the libraries print
    engine = ENGINES[name](file, int(ctx), int(threads), int(clients), *head)
    print(json.dumps(engine.options), file=said, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(json.loads(line))), file=said, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
