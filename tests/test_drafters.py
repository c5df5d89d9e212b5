"""drafters/: the same tokens as plain decoding, acceptance where it is certain, files, vocabularies, brute force."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from block_kit import tiny_block
from fake_cuda import Indexing, OneDevice, on_fake_gpu
from test_tree import files_run, one_line
from tiny import CTX, DRAFT_VOCAB, PROMPT, TREES, V, geometry, node_paths, tables, tiny_head, tiny_model, watch
from torch._dynamo.trace_rules import check_file

import tree as trees
from decoding import sampling
from decoding.drafter import Draft, Drafter, PlainDrafter
from decoding.params import SamplingParams
from decoding.step import DecodeState, decode_step
from drafters import lookahead, ngram
from drafters.block import BlockDrafter
from drafters.draft_model import DraftModelDrafter, check_vocabulary
from drafters.lookahead import LookaheadDrafter
from drafters.medusa import MedusaDrafter, MedusaHeads, load_medusa, save_medusa
from drafters.ngram import NGramDrafter, WithNGrams, graft, lookup
from drafters.trees import DraftRule
from eagle_draft import EagleDrafter
from engine.engine import Engine, EngineConfig

MODEL = tiny_model()
SMALL = tiny_model(seed=5, hidden_size=16, num_attention_heads=2, head_dim=8)
PROMPTS = [PROMPT, PROMPT[:5], [11] + PROMPT * 2]
SHAPE = ("hidden_size", "num_attention_heads", "head_dim")
SETTINGS = [
    dict(),
    dict(temperature=1.0),
    dict(temperature=1.0, top_p=0.9, top_k=20),
    dict(temperature=0.8, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3),
]
SHALLOW = trees.StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def medusa_heads(target=MODEL, count=4, own=False, seed=9) -> MedusaHeads:
    heads = MedusaHeads(target, count, own).to(target.dtype).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return heads


def repadded(model, rows: int):
    """A tiny model with another number of rows of its vocabulary. New rows are most likely, and are no tokens."""
    other = tiny_model(**{name: getattr(model.config, name) for name in SHAPE}, vocab=rows)
    for name, p in other.named_parameters():
        weight = model.get_parameter(name)
        p.copy_(weight if p.shape == weight.shape else F.pad(weight[:rows], (0, 0, 0, max(0, rows - V)), value=9.0))
    return other


def draft_model(model=MODEL, small=SMALL, B=1, tree=SHALLOW, **options):
    built = tables(tree, B)
    return DraftModelDrafter(model, small, built, B, CTX + built.N + 1, DraftRule(**options))


def eagle(model=MODEL, B=1, tree=SHALLOW, K=6):
    built = tables(tree, B)
    head = tiny_head(model, 3, DRAFT_VOCAB, taps=(0, 1))
    return WithNGrams(EagleDrafter(head, built, B, CTX + built.N + K + 1), K)


def block(model=MODEL, B=1, tree=SHALLOW, prune=0.0, **changes):
    built = tables(tree, B)
    head = tiny_block(model, slots=5, **changes)
    return BlockDrafter(head, built, B, CTX + built.N + 1, DraftRule(p_min=prune))


WINDOWS = dict(windows=(0, 3), causal_window=True)
KINDS = {
    "ngram": lambda model, B: NGramDrafter(model, 14, 5),
    "lookahead": lambda model, B: LookaheadDrafter(model, B, CTX + 60),
    "draft model, static": lambda model, B: draft_model(model, B=B),
    "draft model, chain": lambda model, B: draft_model(model, B=B, tree=trees.chain(4)),
    "draft model, more rows": lambda model, B: draft_model(model, repadded(SMALL, V + 3), B),
    "draft model, fewer rows": lambda model, B: draft_model(model, repadded(SMALL, V - 3), B),
    "draft model, dynamic": lambda model, B: draft_model(model, B=B, tree=trees.DynamicTree(12, 3, 4)),
    "medusa": lambda model, B: MedusaDrafter(medusa_heads(model), tables(SHALLOW, B)),
    "medusa, own heads": lambda model, B: MedusaDrafter(medusa_heads(model, own=True), tables(SHALLOW, B)),
    "eagle and n-grams": lambda model, B: eagle(model, B),
    "dynamic eagle and n-grams": lambda model, B: eagle(model, B, trees.DynamicTree(12, 3, 4)),
    "block, static": lambda model, B: block(model, B),
    "block, chain": lambda model, B: block(model, B, trees.chain(4), causal=True),
    "block, tree": lambda model, B: block(model, B, trees.DynamicTree(14, 3, 4), **WINDOWS),
    "block, pruned tree": lambda model, B: block(model, B, trees.DynamicTree(14, 3, 4), 0.02),
    "DSpark, tree": lambda model, B: block(
        model, B, trees.DynamicTree(14, 4, 4), slot0=True, markov="rnn", rank=6, draft_ids=DRAFT_VOCAB
    ),
    "DSpark, static": lambda model, B: block(model, B, slot0=True, markov="gated", rank=6),
    "DFlash2, tree": lambda model, B: block(
        model, B, trees.DynamicTree(14, 3, 4), markov="selector", rank=6, conv_taps=2, conv_group=8, **WINDOWS
    ),
    "block and n-grams": lambda model, B: WithNGrams(block(model, B, trees.DynamicTree(9, 2, 3)), 5),
}


def settings(index: int, **more) -> SamplingParams:
    return SamplingParams(**({"seed": 3, "max_new_tokens": 20} | SETTINGS[index % len(SETTINGS)] | more))


@functools.cache
def plain(params: SamplingParams, row: int = 0) -> tuple[int, ...]:
    """Plain decoding of PROMPTS[row] in float64; row b of a batch draws with seed + b."""
    seed = {**vars(params), "seed": params.seed + row}
    return tuple(Engine(MODEL).generate(PROMPTS[row], SamplingParams(**seed)).run()[0].token_ids)


def steps_of(engine: Engine, prompt, params) -> list[list[int]]:
    return engine.generate(prompt, params).run()[0].tokens_per_step


@functools.cache
def table_model():
    """A float64 target whose next token is a function of the last one: t -> t + 1 in fives. Returns (model, table)."""
    model = tiny_model(layers=1, hidden_size=128)
    for name, p in model.named_parameters():  # attention and MLP add nothing: the hidden state is norm(embedding)
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            p.zero_()
    token = torch.arange(V)
    follow = torch.where(token % 5 == 4, token - 4, (token + 1) % V)
    model.lm_head.weight.copy_(predicting(model, follow))
    return model, follow


def predicting(model, table) -> torch.Tensor:
    """LM head rows [V, H] that make token t predict table[t]."""
    wanted = torch.nn.functional.one_hot(table, V).double() * 50
    return torch.linalg.lstsq(model.norm(model.embed_tokens.weight), wanted).solution.T


# ------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_as_plain_decoding(kind):
    """Every drafter emits the tokens of plain decoding.

    Catches: a drafter that changes the output; also through a second request on the same engine (state left behind by
    the first) and after reuse of the cached prefix.
    """
    engine = Engine(MODEL, drafter=KINDS[kind](MODEL, 1))
    for index in range(len(SETTINGS)):
        result = engine.generate(PROMPT, settings(index)).run()[0]
        assert tuple(result.token_ids) == plain(settings(index))
        assert result.new_tokens == 1 + sum(map(len, result.tokens_per_step))


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_in_a_batch(kind):
    """Every row of a batch emits the tokens of its prompt alone.

    Catches: rows that leak into each other: other lengths, seeds, stops, and a row without a prompt.
    """
    engine = Engine(MODEL, drafter=KINDS[kind](MODEL, 3), config=EngineConfig(batch_size=3))
    for index, rows in ((0, 2), (2, 3)):
        stop = plain(settings(index), 1)[4]
        results = engine.generate_batch(PROMPTS[:rows], settings(index, stop_ids=(stop,))).run()
        for b, result in enumerate(results):
            tokens = plain(settings(index), b)
            end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
            assert tuple(result.token_ids) == tokens[:end]


def wrong(draft: Draft, truth: torch.Tensor, n: torch.Tensor) -> Draft:
    """The same tree with every drafted token replaced by one that the target does not choose."""
    right = truth[:, None].expand(-1, draft.tokens.shape[1], -1)
    right = right.gather(2, (n[:, None] + draft.depth).clamp(max=truth.shape[1] - 1)[..., None])[..., 0]
    tokens = torch.where(draft.tokens == right, (right + 1) % V, draft.tokens)
    tokens[:, 0] = draft.tokens[:, 0]
    return draft._replace(tokens=tokens)


@pytest.mark.parametrize(
    "kind", ("ngram", "draft model, dynamic", "medusa", "eagle and n-grams", "block, static", "DFlash2, tree")
)
def test_hostile_drafts_change_nothing(kind):
    """With every draft made wrong, each step emits one token, that of plain decoding.

    Catches: accepted tokens that are not the target's.
    """
    params = settings(1)
    longer = settings(1, max_new_tokens=50)
    truth = torch.tensor([PROMPT + list(plain(longer))])
    drafter = KINDS[kind](MODEL, 1)
    real = drafter.draft
    drafter.draft = lambda request: wrong(real(request), truth, request.n)
    result = Engine(MODEL, drafter=drafter).generate(PROMPT, params).run()[0]
    assert tuple(result.token_ids) == plain(params)
    assert all(len(step) == 1 for step in result.tokens_per_step)


# ------------------------------------------------------------------ one graph

GRAPHS = {
    "block and n-grams": ("block and n-grams", {}),
    "draft model, dynamic, penalties": ("draft model, dynamic", dict(temperature=1.0, top_p=0.9, presence_penalty=0.4)),
    "medusa": ("medusa", dict(temperature=1.0, top_k=9, repetition_penalty=1.1)),
    "DSpark": ("DSpark, tree", dict(temperature=1.0, top_p=0.9)),
    "DFlash2, penalties": ("DFlash2, tree", dict(temperature=1.0, presence_penalty=0.4)),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_step_is_one_graph_and_never_recompiles(kind):
    """A step of every drafter is traced as one graph, and other prompts and settings do not recompile it.

    Catches: a host read, a graph break, or a guard on a prompt, position, seed or temperature in a drafter.
    """
    torch._dynamo.reset()
    name, sampled = GRAPHS[kind]
    model = tiny_model(torch.float32, layers=1)
    engine, eager = (Engine(model, drafter=KINDS[name](model, 1)) for _ in range(2))
    if "draft model" in name:
        for e in (engine, eager):
            e.drafter.model.float()
            e.drafter.cache = e.drafter.cache.float()
    engine._step = torch.compile(decode_step, fullgraph=True, backend="eager", dynamic=False)
    engine.generate(PROMPT, SamplingParams(**sampled, max_new_tokens=5)).run()
    with torch.compiler.set_stance("fail_on_recompile"):
        for prompt, seed, warmer in ((PROMPT, 5, 0.0), (PROMPT[:3], -4, 0.6), (PROMPT * 3, 77, 0.9)):
            changes = {"temperature": 1.0 + warmer} if sampled else {}
            params = SamplingParams(**(sampled | changes), seed=seed, stop_ids=(7,), max_new_tokens=9)
            assert steps_of(engine, prompt, params) == steps_of(eager, prompt, params)


MULTI_ROUND = {
    "plain": lambda model, B: PlainDrafter(model),
    "draft model, multi-round": lambda model, B: draft_model(model, B=B, multi_round="without"),
}


def tensors_of(thing) -> list[torch.Tensor]:
    """The tensors of a drafter, and of a drafter inside it."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    inner = (*vars(thing).values(), *thing.caches) if isinstance(thing, Drafter) else ()
    return [tensor for value in inner for tensor in tensors_of(value)]


@pytest.mark.parametrize("kind", KINDS | MULTI_ROUND)
def test_a_step_runs_what_is_traced_and_writes_to_caches_alone(kind):
    """Code of a step in a file that TorchDynamo skips, as it does every tree.py: the compiled step would break there. A
    buffer that the engine does not know of: a step compiled in one piece may write to where it was before."""
    drafter = (KINDS | MULTI_ROUND)[kind](MODEL, 2)
    state = DecodeState(MODEL, drafter, 2, CTX)
    mode = settings(3).mode
    root = Path(trees.__file__).parent
    before = [(tensor, tensor.clone()) for tensor in tensors_of(drafter)]
    with torch.inference_mode():
        ran = files_run(lambda: decode_step(MODEL, drafter, state, mode))
    inside = {file for file in ran if Path(file).is_relative_to(root)}
    ours = {file for file in inside if not {"tests", ".venv"} & set(Path(file).relative_to(root).parts)}
    own = ("model.py", *(f"decoding/{name}.py" for name in ("step", "sampling", "verify")))
    assert check_file(trees.__file__).skipped, "tree.py and kernels/growing.py may become one file"
    assert {str(root / name) for name in own} <= ours
    assert trees.__file__ not in ours and [file for file in ours if check_file(file).skipped] == []
    written = {id(tensor) for tensor, old in before if not torch.equal(tensor, old)}
    assert written == {id(tensor) for tensor in drafter.caches}


@pytest.mark.parametrize("kind", ("ngram", "draft model", "dynamic draft model", "medusa", "eagle and n-grams"))
def test_step_never_leaves_the_device(kind):
    """A hidden host read or copy in a drafter: it would stall the GPU and forbid capture. On fake cuda tensors."""
    model, small = (tiny_model(torch.float32, layers=1) for _ in range(2))
    built = trees.DynamicTree(12, 3, 4) if "dynamic" in kind else tables(SHALLOW, 2)
    head, heads, slots = tiny_head(model, 1), medusa_heads(model, 3), CTX + built.N + 8
    with torch._subclasses.fake_tensor.FakeTensorMode(), Indexing():
        for module in (model, small, head, heads):
            on_fake_gpu(module)
        shape = on_fake_gpu(built)
        drafter = {
            "ngram": lambda: NGramDrafter(model, 9, 4),
            "medusa": lambda: MedusaDrafter(heads, shape),
            "eagle and n-grams": lambda: WithNGrams(EagleDrafter(head, shape, 2, slots), 7),
        }.get(kind, lambda: DraftModelDrafter(model, small, shape, 2, slots))()
        state = DecodeState(model, drafter, 2, CTX)
        with OneDevice(), torch.inference_mode():
            out = decode_step(model, drafter, state, SamplingParams(temperature=1.0, top_p=0.9).mode)
        assert out.emitted.shape == (2, drafter.D + 1) and out.emitted.device.type == "cuda"


# ------------------------------------------------------------------ n-grams


def root_draft(root: torch.Tensor) -> Draft:
    """The tree of the root [B] alone."""
    return PlainDrafter(MODEL).draft(SimpleNamespace(root=root))


def matches(text: list[int], D: int, count: int, longest: int = 3) -> list[tuple[int, ...]]:
    """Continuations as in `lookup`, in plain Python: by length of the matched suffix, then by recency."""
    n, found = len(text) - 1, []
    for end in range(n):
        length = 0
        while length < longest and end - length >= 0 and text[end - length] == text[n - length]:
            length += 1
        if length:
            found.append((length, end))
    out = []
    for _, end in sorted(found, reverse=True)[:count]:
        run = list(text)
        for d in range(D):
            run.append(run[end + 1 + d])
        out.append(tuple(run[n + 1 :]))
    return out


def trie(paths: list[tuple[int, ...]], K: int, known: set = frozenset()) -> list[tuple[int, ...]]:
    """The first K new prefixes of the paths, in order."""
    out: list[tuple[int, ...]] = []
    for path in paths:
        for size in range(1, len(path) + 1):
            if path[:size] not in out and path[:size] not in known and len(out) < K:
                out.append(path[:size])
    return out


def spelled(draft: Draft, b: int) -> list[tuple[int, ...]]:
    """The token path of every valid node but the root; checks depth, ancestors and that siblings differ."""
    return list(node_paths(draft, b).values())


def request_for(texts: list[list[int]], slots: int = CTX, junk: int = 3):
    """tokens [B, S] with stale ids behind the root, and n [B]."""
    tokens = torch.full((len(texts), slots), junk)
    for b, text in enumerate(texts):
        tokens[b, : len(text)] = torch.tensor(text)
    return tokens, torch.tensor([len(text) - 1 for text in texts])


@pytest.mark.parametrize("alphabet", (1, 2, 4, 30))
def test_ngram_tree_is_the_brute_force_one(alphabet):
    """Off-by-one in match ends, stale tokens behind the root taken for text, a wrong order of matches, merging that loses
    a branch or links it to another parent: all only lower acceptance."""
    generator = torch.Generator().manual_seed(alphabet)
    lengths = (1, 2, 3, 7, 19, 60)
    texts = [torch.randint(0, alphabet, (size,), generator=generator).tolist() for size in lengths]
    tokens, n = request_for(texts, junk=0)
    for D, K in ((5, 13), (1, 4), (8, 30)):
        found = lookup(tokens, n, D, ngram.CANDIDATES)
        draft = graft(root_draft(tokens.gather(1, n[:, None])[:, 0]), *found, K, D)
        assert draft.tokens.shape == (len(texts), K + 1)
        for b, text in enumerate(texts):
            expected = matches(text, D, ngram.CANDIDATES)
            assert [tuple(p) for p, v in zip(found[0][b].tolist(), found[1][b], strict=True) if v] == expected
            assert spelled(draft, b) == trie(expected, K)


@pytest.mark.parametrize("tree", ("static", "dynamic"))
def test_grafted_nodes_extend_the_eagle_tree(tree):
    """N-gram nodes that repeat the head's (wasted rows), displace them, or hang from the wrong parent."""
    shape = SHALLOW if tree == "static" else trees.DynamicTree(12, 3, 4)
    K, seen, out = 9, [], []
    drafter = eagle(tree=shape, K=K)
    watch(drafter.drafter, "draft", lambda inputs, base: seen.append((base, inputs.tokens.clone(), inputs.n.clone())))
    watch(drafter, "draft", lambda inputs, merged: out.append(merged))
    Engine(MODEL, drafter=drafter).generate(PROMPT, settings(1)).run()
    assert len(out) == len(seen) > 3
    for merged, (base, tokens, n) in zip(out, seen, strict=True):
        kept = base.tokens.shape[1]
        for name in ("tokens", "parent", "depth", "valid"):
            assert torch.equal(getattr(merged, name)[:, :kept], getattr(base, name))
        own, text = spelled(base, 0), tokens[0, : n[0] + 1].tolist()
        expected = trie(matches(text, drafter.D, ngram.CANDIDATES), K, set(own))
        assert spelled(merged, 0) == own + expected


def test_ngrams_accept_a_repetitive_text():
    """Lookup that finds the repetition but drafts it a token late: a text that repeats itself must be drafted whole,
    beyond one period too (D = 7 > 5). Grafted nodes that verification never accepts (wrong depth, slot or mask in the
    wider tree): a random head with 8 n-gram nodes must accept it as n-grams alone do."""
    model, _ = table_model()
    head, params = tiny_head(model, hidden_size=128), SamplingParams(max_new_tokens=60)
    drafters = [NGramDrafter(model, 12, 7)]
    for built in (tables(SHALLOW), trees.DynamicTree(12, 3, 4)):
        alone, other = (EagleDrafter(head, built, 1, CTX + built.N + 9) for _ in range(2))
        assert Engine(model, drafter=alone).generate([10, 11, 12, 13, 14, 10], params).run()[0].tau < 2
        drafters.append(WithNGrams(other, 8))
    for drafter in drafters:
        steps = steps_of(Engine(model, drafter=drafter), [10, 11, 12, 13, 14, 10], params)
        assert all(len(step) == drafter.D + 1 for step in steps[:-1]) and drafter.D in (7, 8)


REFUSED = {
    "verify match": lambda: WithNGrams(draft_model(tree=trees.chain(3), multi_round="without"), 4),
    "ngram-nodes is 0": lambda: eagle(K=0),
    "N is 1": lambda: NGramDrafter(MODEL, 1, 3),
    "4 Medusa heads": lambda: MedusaDrafter(medusa_heads(), tables(trees.PAPER25)),
    "static trees": lambda: MedusaDrafter(medusa_heads(), trees.DynamicTree(8, 2, 2)),
    "static tree or a chain": lambda: draft_model(tree=TREES["dynamic"], multi_round="without"),
    "5 deep, but this head drafts 4 tokens at once; use --tree chain:4": lambda: block(tree=TREES["paper25"]),
    "up to 3 children, and the drafter knows 2": lambda: block(draft_ids=torch.tensor([1, 5])),
}


@pytest.mark.parametrize("message", REFUSED)
def test_drafters_that_cannot_work_are_refused(message):
    """N-grams under the paper's rule, more depths than heads or slots, whose tokens would be
    those of other slots, or ids of another tokenizer."""
    one_line(REFUSED[message], message)


# ------------------------------------------------------------------ lookahead


class Jacobi:
    """Lookahead in plain Python: the choice behind every row of the window by a whole forward of its path."""

    def __init__(self, params, window: list[list[int]]):
        self.params, self.window, self.made = params, window, []

    def choice(self, ids: list[int]) -> int:
        hidden, _ = MODEL.forward_train(torch.tensor([ids]))
        keys = MODEL.logits(hidden[0, -1])
        if self.params.temperature > 0:
            where, seed = torch.tensor([[len(ids)]]), torch.tensor([self.params.seed])
            keys = keys + self.params.temperature * sampling.gumbel_noise(seed, where, torch.arange(V))[0, 0]
        return int(keys.argmax())

    def guesses(self, root: int) -> list[tuple[int, ...]]:
        return [gram[1:] for gram in reversed(self.made) if gram[0] == root]

    def step(self, text: list[int]) -> None:
        """text: the tokens up to the root, as they were when the step began."""
        columns = range(len(self.window[0]))
        paths = [self.window[0][: i + 1] + [level[i] for level in self.window[1:]] for i in columns]
        grams = [*self.window, [self.choice(text + path) for path in paths]]
        self.made += [tuple(level[i] for level in grams) for i in columns]
        self.window = grams[1:]


@pytest.mark.parametrize("index", (0, 1))
def test_lookahead_is_the_brute_force_one(index, monkeypatch):
    """A window row with a wrong position, mask, noise or level, or n-grams of the wrong token, order or step: the text
    stays right and n-grams turn useless."""
    for name, value in {"SIZE": 4, "WINDOW": 3, "GUESSES": 2}.items():
        monkeypatch.setattr(lookahead, name, value)
    drafter, steps = LookaheadDrafter(MODEL, 1, CTX + 60), []
    engine = Engine(MODEL, drafter=drafter, config=EngineConfig(eagle_always=True))
    watch(drafter, "draft", lambda inputs, draft: steps.append((inputs.tokens[0, : inputs.n[0] + 1].tolist(), draft)))
    params = settings(index, max_new_tokens=24)
    assert tuple(engine.generate(PROMPT, params).run()[0].token_ids) == plain(params)
    N = 1 + drafter.guesses  # the rows of the window behind them are invalid, so none can be accepted
    windows = [draft.tokens[0, N:].view(3, 3).tolist() for _, draft in steps]
    brute, checked = Jacobi(params, windows[0]), 0
    for (text, out), window in zip(steps, windows, strict=True):
        assert window == brute.window
        assert not out.ancestors[:, :N, N:].any() and not out.valid[:, N:].any()
        tree = Draft(*(x[:, :N] for x in out[:3]), out.ancestors[:, :N, :N], out.valid[:, :N], out.scores)
        assert spelled(tree, 0) == trie(brute.guesses(text[-1]), drafter.guesses)
        checked += bool(brute.guesses(text[-1]))
        brute.step(text)
    assert checked > 3


def test_lookahead_speculates_and_forgets_between_requests():
    """N-grams that are never found again, or numbers that depend on the requests before."""
    model, _ = table_model()
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_new_tokens=60)
        engine = Engine(model, drafter=LookaheadDrafter(model, 1, CTX + 60), config=EngineConfig(eagle_always=True))
        (first,) = engine.generate([10, 11], params).run()
        assert first.tau > 3 and max(map(len, first.tokens_per_step)) == lookahead.SIZE
        steps_of(engine, [3, 90, 40], params)
        assert steps_of(engine, [10, 11], params) == first.tokens_per_step


# ------------------------------------------------------------------ draft model


@pytest.mark.parametrize("tree", (trees.chain(4), TREES["medusa"], trees.DynamicTree(6, 4, 1)))
@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_the_target_itself_as_draft_is_accepted_whole(tree, index):
    """A token, position, mask, noise row, filter or penalty that is off by one in the draft: when the draft model is the
    target, every step must yield D + 1 tokens, greedy and sampled."""
    drafter = draft_model(MODEL, MODEL, tree=tree)
    result = Engine(MODEL, drafter=drafter).generate(PROMPT, settings(index, max_new_tokens=32)).run()[0]
    assert all(len(step) == drafter.D + 1 for step in result.tokens_per_step[:-1])


@pytest.mark.parametrize("rows", (V - 3, V + 3))
def test_another_padding_of_the_vocabulary_costs_no_acceptance(rows):
    """Qwen2.5-0.5B (151,936 rows) for Qwen2.5-7B (152,064): refused, or a draft that loses itself in rows of no token."""
    for index in range(2):
        own = Engine(MODEL, drafter=draft_model(MODEL, MODEL, tree=trees.chain(4)))
        other = Engine(MODEL, drafter=draft_model(MODEL, repadded(MODEL, rows), tree=trees.chain(4)))
        ids = [e.generate(PROMPT, settings(index, max_new_tokens=40)).run()[0] for e in (own, other)]
        assert ids[0].token_ids == ids[1].token_ids
        lost = sum(token >= rows for token in ids[0].token_ids)
        assert ids[0].steps <= ids[1].steps <= ids[0].steps + 2 * lost and lost < 6


def test_the_target_itself_in_a_batch():
    """The same with rows of other lengths and trees."""
    drafter = draft_model(MODEL, MODEL, 3, [trees.chain(4), TREES["medusa"], trees.chain(2)])
    engine = Engine(MODEL, drafter=drafter, config=EngineConfig(batch_size=3))
    for result, most in zip(engine.generate_batch(PROMPTS, settings(1)).run(), (5, 5, 3), strict=True):
        assert all(len(step) == most for step in result.tokens_per_step[:-1])


@pytest.mark.parametrize("tree", ("medusa", "dynamic"))
def test_draft_cache_after_rejections_equals_recomputation(tree):
    """Rows of rejected branches that survive in the draft cache: acceptance decays as the text grows."""
    drafter = draft_model(tree=TREES[tree])
    engine, checked = Engine(MODEL, drafter=drafter), []

    def check(inputs, out):
        n = int(inputs.n[0])
        (fresh,) = SMALL.new_cache(1, drafter.slots)
        seen = torch.ones(1, n + 1, n + 1, dtype=torch.bool).tril()
        nodes = SMALL.nodes(torch.zeros(1, dtype=torch.int64), torch.arange(n + 1)[None], seen, drafter.slots)
        hidden, _ = SMALL(inputs.tokens[:, : n + 1], nodes, (fresh,))
        assert (drafter.cache[..., : n + 1, :] - fresh[..., : n + 1, :]).abs().max() < 1e-5
        assert (out[0, 0] - hidden[0, -1]).abs().max() < 1e-5
        checked.append(int(inputs.count[0]))

    watch(drafter, "_extend", check)
    params = SamplingParams(temperature=3.0, seed=1, max_new_tokens=40)  # shared noise makes drafts right
    engine.generate(PROMPT, params).run()
    text = PROMPT + [8, 9]
    engine.generate(text, params).run()  # with the cached prefix
    assert max(checked) > 2 and min(checked[1:]) == 1


@pytest.mark.parametrize("rule", ("without", "with"))
@pytest.mark.parametrize("tree", ("chain4", "medusa"))
def test_multi_round_with_a_draft_model(rule, tree):
    """Algorithm 1 with the target as its own draft: p = q, so chains accept every token; greedy equals plain greedy."""
    twin = Engine(MODEL, drafter=draft_model(MODEL, MODEL, tree=TREES[tree], multi_round=rule))
    result = twin.generate(PROMPT, settings(1, max_new_tokens=32)).run()[0]
    assert all(len(step) == twin.drafter.D + 1 for step in result.tokens_per_step[:-1]) or tree != "chain4"
    assert result.tau > 2.5
    small = Engine(MODEL, drafter=draft_model(tree=TREES[tree], multi_round=rule))
    assert tuple(small.generate(PROMPT, settings(0)).run()[0].token_ids) == plain(settings(0))


def test_another_vocabulary_is_refused():
    """Ids of another tokenizer drafted as if they were the target's: lossless, useless, and silent."""
    one_line(lambda: check_vocabulary(MODEL.config, geometry(vocab=101)), "101 tokens", "97")
    assert "another padding" in check_vocabulary(MODEL.config, geometry(vocab=98))
    pair = [SimpleNamespace(pieces=dict(enumerate(pieces))) for pieces in ("abc", "axc")]
    check_vocabulary(MODEL.config, SMALL.config, (pair[0], pair[0]))
    check_vocabulary(MODEL.config, SMALL.config, (pair[0], None))
    one_line(lambda: check_vocabulary(MODEL.config, SMALL.config, tuple(pair)), "token 1 is 'x'", "'b'", "1 differ")
    more = SimpleNamespace(pieces=dict(enumerate("abcd")))
    assert check_vocabulary(MODEL.config, geometry(vocab=200), (pair[0], more)) == ""


# ------------------------------------------------------------------ Medusa


def test_medusa_tokens_are_cartesian():
    """Rank r at depth d must be head d - 1's r-th best whatever its parent, from the hidden state before the root, with
    that depth's noise."""
    heads, out = medusa_heads(), []
    drafter = MedusaDrafter(heads, tables(SHALLOW))
    watch(drafter, "draft", lambda inputs, draft: out.append((inputs.tokens.clone(), int(inputs.n[0]), draft)))
    params = settings(1)
    Engine(MODEL, drafter=drafter).generate(PROMPT, params).run()
    for tokens, n, draft in out:
        hidden = MODEL.forward_train(tokens[:, : n + 1])[0][0, n - 1]
        for i, path in enumerate(SHALLOW.paths, 1):
            block, d = heads[len(path) - 1][0].linear, len(path)
            z = MODEL.logits(hidden + torch.nn.functional.silu(hidden @ block.weight.T + block.bias))
            where, seed = torch.tensor([[n + d]]), torch.tensor([params.seed])
            keys = z + sampling.gumbel_noise(seed, where, torch.arange(V))[0, 0]
            assert int(draft.tokens[0, i]) == int(keys.argsort(descending=True)[path[-1]])


def test_medusa_heads_that_are_right_are_accepted_whole():
    """Heads indexed or fed one token off: on a target whose last token decides the next ones, heads built from its table
    must be accepted whole, greedy and sampled."""
    model, follow = table_model()
    heads = MedusaHeads(model, 4, own_lm_head=True).double().requires_grad_(False)
    table = follow
    for head in heads:
        table = follow[table]
        head[0].linear.weight.zero_()
        head[0].linear.bias.zero_()
        head[1].weight.copy_(predicting(model, table))
    for tree, temperature in ((trees.chain(4), 0.0), (SHALLOW, 0.0), (trees.chain(3), 0.7)):
        drafter = MedusaDrafter(heads, tables(tree))
        params = SamplingParams(temperature=temperature, max_new_tokens=40)
        steps = steps_of(Engine(model, drafter=drafter), PROMPT, params)
        assert all(len(step) == drafter.D + 1 for step in steps[:-1])


@pytest.mark.parametrize("own", (False, True))
def test_medusa_file_round_trip(tmp_path, own):
    """Names other than the published ones, heads in another order, or precision lost: `.pt` and `.safetensors`."""
    heads = medusa_heads(own=own)
    save_medusa(heads.state_dict(), tmp_path / "st", torch.float64)
    (tmp_path / "pt").mkdir()
    tensors = {name: t.clone() for name, t in heads.state_dict().items()}
    assert "2.0.linear.bias" in tensors and ("3.1.weight" in tensors) == own
    torch.save(tensors, tmp_path / "pt" / "medusa_lm_head.pt")
    for where in ("st", "pt", "pt/medusa_lm_head.pt"):
        found = load_medusa(tmp_path / where, MODEL)
        assert len(found) == 4 and found.own_lm_head == own
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), heads.parameters(), strict=True))


def test_damaged_medusa_files_are_refused(tmp_path):
    """A head that is missing, misshapen, of two blocks or not finite, loaded as if it were whole."""
    tensors = {name: t.clone() for name, t in medusa_heads().state_dict().items()}
    file = tmp_path / "medusa_lm_head.pt"
    bad = {
        ("missing",): {k: v for k, v in tensors.items() if k != "1.0.linear.bias"},
        ("is torch.float32 [5, 5]", "[32, 32]"): tensors | {"0.0.linear.weight": torch.zeros(5, 5)},
        ("one block",): tensors | {"0.2.weight": torch.zeros(V, 32)},
        ("missing ",): tensors | {"0.1.weight": torch.zeros(V, 32)},
        ("NaN",): tensors | {"3.0.linear.bias": torch.full((32,), float("nan"))},
    }
    for message, content in bad.items():
        torch.save(content, file)
        one_line(lambda: load_medusa(file, MODEL), *message)
    one_line(lambda: load_medusa(tmp_path / "..", MODEL), "found 0")
    one_line(lambda: load_medusa(tmp_path / "none.pt", MODEL), "no such file")
