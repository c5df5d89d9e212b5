"""tree.py, kernels/growing.py and decoding/verify.py against brute force in plain Python and exact rational arithmetic.

Checks are functions of an implementation (the names of these three files, or of mutated copies of their sources), so
that every mutant of `test_mutants_are_caught` fails the very check that guards the real code.
"""

import functools
import itertools
import json
import math
import random
import sys
import types
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny import one_line

import tree
from decoding import verify
from drafters.trees import of_nodes
from kernels import growing
from kernels.backend import Operation
from tree import PAPER25, DynamicTree, StaticTree, chain, parse_tree, tree_tables

FILES = (growing, tree, verify)  # in import order
SOURCES = {module.__name__: Path(module.__file__).read_text() for module in FILES}


def names_of(modules):
    """All names of these modules in one namespace."""
    return types.SimpleNamespace(**{name: value for m in modules for name, value in vars(m).items()})


real = names_of(FILES)


def mutant(old, new):
    """Copies of the three files with one piece of one source replaced; they import each other, not the originals. Their
    operators, which plain code does not call, are not registered again."""
    found = sum(source.count(old) for source in SOURCES.values())
    assert found == 1, f"{old!r} occurs {found} times"
    copies = {name: types.ModuleType(name) for name in SOURCES}
    with mock.patch.dict(sys.modules, copies), mock.patch.object(Operation, "_register"):
        for name, source in SOURCES.items():
            exec(compile(source.replace(old, new), f"mutated_{name}", "exec"), vars(copies[name]))
    return names_of(copies.values())


# ------------------------------------------------------------------------------------------- shapes of trees


@functools.cache
def forests(nodes):
    """All ordered forests with that many nodes; a tree is the forest of its root's subtrees."""
    if nodes == 0:
        return [()]
    split = range(1, nodes + 1)
    return [(sub, *rest) for k in split for sub in forests(k - 1) for rest in forests(nodes - k)]


def forest_paths(forest, prefix=()):
    for rank, sub in enumerate(forest):
        yield (*prefix, rank)
        yield from forest_paths(sub, (*prefix, rank))


def all_trees(drafted):
    """Every static tree with up to `drafted` nodes below the root (1, 1, 2, 5, 14, 42, 132 per size)."""
    return [StaticTree(tuple(forest_paths(f))) for n in range(drafted + 1) for f in forests(n)]


def random_tree(rng, most=14, bias=0.5):
    """A random static tree: new nodes go below a random node or, with chance `bias`, below the latest."""
    children = {(): 0}
    for _ in range(rng.randint(0, most)):
        options = [p for p in children if len(p) < 6]
        path = options[-1] if rng.random() < bias else rng.choice(options)
        children[(*path, children[path])] = 0
        children[path] += 1
    return StaticTree(tuple(p for p in children if p))


# 'parent path: number of children', as the published trees are listed
MC_SIM = {"": 10, "0": 10, "1": 7, "2": 3, "3": 2} | dict.fromkeys("456789", 1)
MC_SIM |= {"00": 10, "01": 3, "02": 2} | dict.fromkeys(("03", "04", "05", "06", "07"), 1)
MC_SIM |= {"10": 2, "20": 1, "000": 2}
STAGE2 = {"": 10, "0": 10, "1": 5, "2": 2, "3": 2} | dict.fromkeys("4567", 1)
STAGE2 |= {"00": 9, "01": 4, "02": 2, "03": 1, "04": 1, "05": 1, "10": 3, "11": 1, "20": 1}
STAGE2 |= {"000": 4, "001": 1, "002": 1, "010": 1}


def tokens_of(t, root, candidates):
    """The tokens of a static tree's nodes, where every run row proposes its own candidates [B, run_rows, K]."""
    return of_nodes(t, t.source_row, root, candidates, candidates)[0]


def test_paper25_is_the_published_tree():
    """A wrong node order or parent in the paper's tree: drafts would land in the wrong rows."""
    t = PAPER25
    assert (t.N, t.D, t.max_children, t.branching) == (26, 5, 4, (4, 3, 3, 3, 2))
    below = [0] * 5 + [1] * 3 + [2, 2, 3, 3, 4] + [5] * 3 + [6, 6, 7, 7, 8] + [13] * 3 + [21, 21]
    assert list(t.parent) == below
    assert [t.depth.count(d) for d in range(6)] == [1, 4, 8, 8, 3, 2]
    assert t.levels == ((1, 2, 3, 4), (5, 6, 7, 8), (13,), (21,))


def test_paper25_tables_match_the_official_buffers():
    """A draft mask or candidate index unlike EAGLE-1's buffers lowers acceptance."""
    t = tree_tables([PAPER25])
    flat = [*range(5), 11, 12, 13, 21, 22, 31, 32, 41, 51, 52, 53, 61, 62, 71, 72, 81, 91, 92, 93, 101, 102]
    assert [0] + (t.rank + 10 * t.source_row + 1)[0, 1:].tolist() == flat
    assert t.run_rows == 11
    assert [tuple(v.visible.shape[1:]) for v in t.levels] == [(4, 4), (4, 8), (1, 9), (1, 10)]
    # a place is 4 * source + rank here
    assert [(v.place % 4 + 10 * v.source)[0].tolist() for v in t.levels] == [[0, 1, 2, 3], [0, 1, 2, 10], [0], [0]]
    assert all(torch.equal(v.place // 4, v.source) for v in t.levels)
    assert [v.depth for v in t.levels] == [1, 2, 3, 4]


def test_medusa_shapes():
    """A published Medusa tree that cannot be expressed, comes out with other depths, or lost a node in our list."""
    shapes = {"mc_sim_7b_63": (MC_SIM, [1, 10, 28, 23, 2]), "vicuna_7b_stage2": (STAGE2, [1, 10, 23, 23, 7])}
    for name, (counts, by_depth) in shapes.items():
        t = parse_tree(f"medusa:{name}")
        assert t.N == 64 and [t.depth.count(d) for d in range(5)] == by_depth
        nodes = ["", *("".join(map(str, path)) for path in t.paths)]
        assert {nodes[i]: t.parent[1:].count(i) for i in set(t.parent[1:])} == counts


def test_chain_and_root_only():
    """Off-by-one in the two degenerate trees that plain decoding and speculative sampling use."""
    c = chain(5)
    assert (c.N, c.D, c.parent, c.depth) == (6, 5, (0, 0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5))
    assert c.levels == ((1,), (2,), (3,), (4,))
    r = StaticTree(())
    assert (r.N, r.D, r.parent, r.levels, r.max_children) == (1, 0, (0,), (), 0)
    t = tree_tables([r, r])
    assert t.levels == () and t.run_rows == 1
    assert tokens_of(t, torch.tensor([7, 8]), torch.zeros(2, 1, 0, dtype=torch.int64)).tolist() == [[7], [8]]
    assert StaticTree(((0, 0), (1,), (0,))) == StaticTree(([0], [1], [0, 0]))


BAD_PATHS = [
    ([[0, 0]], "needs path (0,)"), ([[1]], "needs path (0,)"), ([[0], [0, 1]], "needs path (0, 0)"),
    ([[0], [0]], "twice"), ([[0], []], "1 to 16"), ([[0] * 17], "1 to 16"), ([[i] for i in range(256)], "255"),
    ([[0], [-1]], "integers >= 0"), ([[0], [True]], "integers >= 0"), ([[0], [0.0]], "integers >= 0"),
    ([[0], "1"], "must be a list"), ([[10**4000]], "needs path"),
]  # fmt: skip


@pytest.mark.parametrize("paths, message", BAD_PATHS, ids=[m for _, m in BAD_PATHS])
def test_bad_paths_are_refused(paths, message):
    """A tree with a missing parent or skipped rank would read another node's candidates silently."""
    one_line(lambda: StaticTree(tuple(paths)), "tree: ", message)


def test_parse_tree(tmp_path):
    """A spec that is misread (depth for D, drafted nodes for N) builds another tree than asked for."""
    assert parse_tree("paper25") is PAPER25
    assert parse_tree("chain:3") == chain(3)
    d = parse_tree("dynamic:60,5,10")
    assert (d.N, d.depth, d.topk, d.D, d.pool) == (60, 5, 10, 6, 510)
    assert DynamicTree(60, 7, 10).pool == 710
    file = tmp_path / "t.json"
    for data, want in (
        ([[0], [1], [0, 0]], StaticTree(((0,), (1,), (0, 0)))),
        ({"paths": PAPER25.paths, "gpu": "any"}, PAPER25),
        ({"dynamic": [24, 6, 8], "note": 1}, DynamicTree(24, 6, 8)),
    ):
        file.write_text(json.dumps(data))
        assert parse_tree(str(file)) == want


BAD_SPECS = "chain chain:0 chain:17 chain:-1 chain:x chain:1,2 paper26 dynamic:1,5,10 dynamic:60,5 dynamic:257,5,10"
BAD_SPECS = [*BAD_SPECS.split(), "dynamic:60,16,10", "dynamic:60,5,0", "dynamic:60,0,10", "dynamic:9,,1", "", "x" * 999]


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_bad_specs_are_refused(spec):
    """A typo in --tree that falls back to some other tree, or a traceback instead of one line."""
    one_line(lambda: parse_tree(spec))


BAD_FILES = [b"", b"{", b"[]", b"{}", b"3", b"null", b'{"paths": []}', b'{"paths": [[0]], "dynamic": [9, 2, 4]}']
BAD_FILES += [b'{"dynamic": [9, 2]}', b'{"dynamic": [9, 2, "4"]}', b"\xff\xfe\x00", b"[" * 100_000, b"[[0], 1]"]
BAD_FILES += [b"[[0]," + b" " * (1 << 20) + b"[1]]", b"[[" + b"9" * 5000 + b"]]"]


@pytest.mark.parametrize("content", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_tree_files_are_refused(tmp_path, content):
    """A broken, hostile or huge tree file ending in a traceback (deep nesting, huge numbers, wrong keys)."""
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    one_line(lambda: parse_tree(str(file)), "bad.json")
    one_line(lambda: parse_tree(str(tmp_path / "missing.json")), "missing.json")


# ------------------------------------------------------------------------------------------ tables and masks


def check_tables(impl, trees):
    """Every tensor of tree_tables against the paths themselves."""
    t = impl.tree_tables(trees)
    N, K = max(s.N for s in trees), max(s.max_children for s in trees)
    assert (t.N, t.D, t.max_children) == (N, max(s.D for s in trees), K)
    candidates = torch.arange(len(trees) * t.run_rows * K).view(len(trees), t.run_rows, K)
    tokens = tokens_of(t, torch.full((len(trees),), -7), candidates)
    for b, s in enumerate(trees):
        nodes = [(), *s.paths]
        inner = {p[:-1] for p in s.paths} - {()}
        run = {(): 0}  # which run row holds each node's own prediction
        seen, seen_nodes, row, above = [], [], 1, 0
        for d, level in enumerate(t.levels, 1):
            want = [i for i, p in enumerate(nodes) if len(p) == d and p in inner]
            live = level.valid[b].tolist()
            assert level.depth == d
            assert level.node[b].tolist() == want + [0] * (len(live) - len(want))
            assert live == [True] * len(want) + [False] * (len(live) - len(want))
            rows = [nodes[i] for i in want]
            for w, path in enumerate(rows):
                run[path] = row + w
                source = run[path[:-1]] - above  # among the rows of the level above
                assert level.source[b, w] == source and level.place[b, w] == source * K + path[-1]
            seen_nodes += [*rows, *[None] * (len(live) - len(rows))]
            seen = [*[None] * (len(seen_nodes) - len(live)), *range(len(live))]
            for w in range(len(live)):
                mine = rows[w] if w < len(rows) else None
                for r, other in enumerate(seen_nodes):
                    ancestor = mine is not None and other is not None and mine[: len(other)] == other
                    assert level.visible[b, w, r].item() == (ancestor or seen[r] == w), (b, d, w, r)
            above, row = row, row + len(live)
        assert row == t.run_rows
        for i in range(N):
            path = nodes[i] if i < s.N else None
            assert t.valid[b, i].item() == (path is not None)
            for j in range(N):
                other = nodes[j] if j < s.N else None
                sees = i == j if path is None else other is not None and path[: len(other)] == other
                assert t.ancestors[b, i, j].item() == sees
            kids = [j for j, p in enumerate(nodes) if path is not None and p and p[:-1] == path]
            assert t.children[b, i].tolist() == kids + [0] * (K - len(kids))
            if path is None or path == ():
                assert t.parent[b, i] == t.depth[b, i] == t.rank[b, i] == t.source_row[b, i] == 0
            else:
                assert nodes[t.parent[b, i]] == path[:-1] and t.depth[b, i] == len(path)
                assert tokens[b, i] == candidates[b, run[path[:-1]], path[-1]]
        assert tokens[b, 0] == -7


def test_tables_of_batches():
    """A mask, source row or padding row of a batch of different trees that sees another branch; padding of small trees
    beside big ones, such as a one-node tree with the paper's tree and a chain."""
    for seed in range(40):
        rng = random.Random(seed)
        check_tables(real, [random_tree(rng, bias=rng.random()) for _ in range(1 + seed % 4)])
    trees = [PAPER25, StaticTree(()), chain(3), parse_tree("medusa:vicuna_7b_stage2"), chain(1)]
    check_tables(real, trees)
    for t in trees:
        check_tables(real, [t, t])


def check_ancestors(impl):
    """One doubling step too few cuts the ancestors of the deepest nodes, as in chains of 16."""
    rng = random.Random(1)
    for t in (*map(chain, range(1, 17)), *(random_tree(rng, most=20, bias=0.8) for _ in range(100))):
        for D in {t.D, t.D + 3}:
            seen, depth = impl.ancestors_from_parents(torch.tensor([t.parent]), D)
            assert depth[0].tolist() == list(t.depth)
            for i in range(t.N):
                above, node = {0, i}, i
                while node:
                    node = t.parent[node]
                    above.add(node)
                assert {j for j in range(t.N) if seen[0, i, j]} == above


# --------------------------------------------------------------------------------------------- dynamic trees


def official_tree(model, N, depth, K):
    """EAGLE-2's tree in Python lists: (tokens, parent, depth), ties to the lower flat id.

    model(path) gives the K (token, log-probability) candidates after the drafted path, best first.
    """
    pool = [(token, value, None, (token,)) for token, value in model(())]
    frontier = list(range(K))
    for _ in range(depth):
        block = []
        for f in frontier:
            _, score, _, path = pool[f]
            block += [(token, score + value, f, (*path, token)) for token, value in model(path)]
        order = sorted(range(len(block)), key=lambda j: (-block[j][1], j))
        frontier = [len(pool) + j for j in order[:K]]
        pool += block
    best = sorted(range(len(pool)), key=lambda j: (-pool[j][1], j))[: N - 1]
    kept = sorted(best)
    parent = [0] + [0 if pool[f][2] is None else 1 + kept.index(pool[f][2]) for f in kept]
    return [pool[f][0] for f in kept], parent, [0] + [len(pool[f][3]) for f in kept]


def table_model(seed, K, kind):
    """Deterministic candidates per path. All values but those of 'random' are dyadic: exact in fp32."""

    @functools.cache
    def model(path):
        rng = random.Random(f"{seed} {path}")
        if kind == "random":
            logits = [rng.gauss(0, 2) for _ in range(K + 3)]
            total = math.log(sum(map(math.exp, logits)))
            values = [x - total for x in logits]
        elif kind == "ties":
            values = [-rng.randint(0, 2) for _ in range(K)]
        elif kind == "equal":
            values = [-1.0] * K
        elif kind == "peaked":  # a sure child scores exactly what its parent scores
            values = [0.0] + [-30.0 - rng.randint(0, 3) / 4 for _ in range(K - 1)]
        else:  # "inf": candidates that the head gives no probability at all
            values = [rng.choice([0.0, -0.5, -math.inf]) for _ in range(K)]
        values = sorted(values, reverse=True)[:K]
        return list(zip(rng.sample(range(1000), K), values, strict=True))

    return model


def draft(impl, models, depth, K, dtype, follow=True):
    """The pool when every frontier row asks its model; checks draft masks and feature sources on the way."""
    first = [model(()) for model in models]
    pool = impl.first_level(
        torch.tensor([[t for t, _ in row] for row in first]),
        torch.tensor([[v for _, v in row] for row in first], dtype=dtype),
    )
    run = [[] for _ in models]
    for i in range(depth):
        tokens, scores = [], []
        for b, model in enumerate(models):
            flat, above, ids = pool.frontier[b].tolist(), pool.parent[b].tolist(), pool.tokens[b].tolist()
            assert pool.frontier_tokens[b].tolist() == [ids[f] for f in flat]
            lines = []
            for f in flat:
                line = [f]
                while above[line[-1]] >= 0:
                    line.append(above[line[-1]])
                lines.append(line)
            if i:  # `source` names the row of the forward before whose output feature is passed on
                before = run[b][-K:]
                assert [before[s] for s in pool.source[b].tolist()] == [line[1] for line in lines]
            run[b] += flat
            for k, line in enumerate(lines):
                assert len(line) == i + 1
                assert pool.visible[b, k].tolist() == [f in line for f in run[b]]
            rows = [model(tuple(ids[f] for f in reversed(line))) for line in lines]
            tokens.append([[t for t, _ in row] for row in rows])
            scores.append([[v for _, v in row] for row in rows])
        pool = impl.expand(pool, torch.tensor(tokens), torch.tensor(scores, dtype=dtype))
    return pool


def check_dynamic(impl):
    """Any difference from EAGLE-2's algorithm: node for node equal to Python lists, also with exact ties."""
    for kind in ("random", "ties", "equal", "peaked", "inf"):
        for case in range(12):
            rng = random.Random(f"{kind}{case}")
            K, depth = rng.randint(1, 5), rng.randint(0, 4)
            size = K + depth * K * K
            N = 1 + rng.randint(1, size)
            models = [table_model(f"{case} {b}", K, kind) for b in range(3)]
            dtype = torch.float64 if kind == "random" else torch.float32
            pool = draft(impl, models, depth, K, dtype)
            root = torch.tensor([5, 6, 7])
            whole = impl.select(pool, root, N, depth + 1)
            small = [rng.randint(1, N) for _ in models]
            less = impl.select(pool, root, N, depth + 1, live=torch.tensor(small))
            assert whole.valid.all() and whole.tokens[:, 0].tolist() == [5, 6, 7]
            for b, model in enumerate(models):
                for got, n in ((whole, N), (less, small[b])):
                    tokens, parent, depths = official_tree(model, n, depth, K)
                    assert got.tokens[b, 1:n].tolist() == tokens
                    assert got.parent[b, :n].tolist() == parent
                    assert got.depth[b, :n].tolist() == depths
                    assert got.valid[b].tolist() == [True] * n + [False] * (N - n)
                    assert not got.parent[b, n:].any() and not got.depth[b, n:].any()
                    for i in range(N):
                        line = {i}
                        while i < n and max(line) and min(line):
                            line.add(parent[min(line)])
                        assert {j for j in range(N) if got.ancestors[b, i, j]} == line


def test_dynamic_tree_at_published_sizes():
    """Overflow or wrong offsets that small pools hide: 60/5/10, 32/8/4 and 60/7/10 as published."""
    for N, depth, K in ((60, 5, 10), (32, 8, 4), (60, 7, 10)):
        models = [table_model(f"big {b}", K, kind) for b, kind in enumerate(("random", "peaked"))]
        pool = draft(real, models, depth, K, torch.float64)
        assert pool.tokens.shape[1] == DynamicTree(N, depth, K).pool
        built = growing.select(pool, torch.tensor([1, 2]), N, depth + 1)
        for b, model in enumerate(models):
            tokens, parent, depths = official_tree(model, N, depth, K)
            assert built.tokens[b, 1:].tolist() == tokens and built.parent[b].tolist() == parent
            assert built.depth[b].tolist() == depths


def check_parents_survive(impl):
    """Equal, infinite, positive or NaN scores and half precision that keep a child and drop its parent. Tokens are flat
    ids, which show lineage."""
    values = torch.tensor([0.0, -0.0, -1e-7, -1.0, 1e-7, 2.0, -math.inf, math.inf, math.nan])
    for case in range(120):
        gen = torch.Generator().manual_seed(case)
        B, K, depth = 4, 1 + case % 4, 1 + case % 3
        some = values[torch.randperm(len(values), generator=gen)[: 1 + case % len(values)]]
        dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float16)[case % 4]

        def scores(*shape, some=some, gen=gen, dtype=dtype):
            return some[torch.randint(len(some), shape, generator=gen)].to(dtype)

        pool = impl.first_level(torch.arange(K).expand(B, K), scores(B, K))
        for _ in range(depth):
            size = pool.tokens.shape[1]
            ids = torch.arange(size, size + K * K).view(1, K, K).expand(B, K, K)
            pool = impl.expand(pool, ids, scores(B, K, K))
        P = pool.tokens.shape[1]
        assert not pool.scores.isnan().any()
        for N in range(2, P + 2):
            built = impl.select(pool, torch.full((B,), -1), N, depth + 1)
            mine = built.tokens[:, 1:]
            assert torch.equal(pool.parent.gather(1, mine), built.tokens.gather(1, built.parent[:, 1:]))
            assert (built.parent[:, 1:] < torch.arange(1, N)).all() and (mine.diff(dim=1) > 0).all()


def test_half_precision_scores_are_widened():
    """Cumulative scores rounded in bf16: -0.0039 vanishes beside -1 and a child ties with its parent."""
    pool = growing.first_level(torch.tensor([[0, 1]]), torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16))
    pool = growing.expand(pool, torch.zeros(1, 2, 2, dtype=torch.int64), torch.full((1, 2, 2), -0.00390625).bfloat16())
    assert pool.scores.dtype == torch.float32 and pool.scores[0, 2].item() == -1.00390625


def test_select_size_is_checked():
    """A request for more nodes than the pool holds must be one clear line, not an index error."""
    pool = growing.first_level(torch.tensor([[0, 1]]), torch.zeros(1, 2))
    one_line(lambda: growing.select(pool, torch.tensor([0]), 4, 1), "allowed 1 to 3")


# ------------------------------------------------------------------------------------------- choice-and-walk


def run_accept(impl, t, tokens, choice, valid=None):
    return impl.accept(tokens, t.parent, t.depth, t.ancestors, t.valid if valid is None else valid, choice, t.D)


def check_accept_walk(impl):
    """Skipped levels, wrong tie-breaks, invalid nodes accepted, one sequence reading another's tree: accept() against a
    recursive walk, on batches of trees with invalid nodes and repeated tokens."""
    rng = random.Random(3)
    for _ in range(200):
        trees = [random_tree(rng, most=10, bias=rng.random()) for _ in range(3)]
        t = impl.tree_tables(trees)
        V = rng.randint(1, 3)
        tokens = torch.tensor([[rng.randrange(V) for _ in range(t.N)] for _ in trees])
        choice = torch.tensor([[rng.randrange(V) for _ in range(t.N)] for _ in trees])
        live = t.valid & (torch.tensor([[rng.random() for _ in range(t.N)] for _ in trees]) < 0.9)
        got = run_accept(impl, t, tokens, choice, live)
        for b, s in enumerate(trees):

            def deepest(i, b=b, s=s, live=live, tokens=tokens, choice=choice):
                found = [(s.depth[i], -i)]
                for j in range(1, s.N):
                    if s.parent[j] == i and live[b, j] and tokens[b, j] == choice[b, i]:
                        found.append(deepest(j))
                return max(found)

            node = -deepest(0)[1]
            path = [node]
            while path[-1]:
                path.append(s.parent[path[-1]])
            path = path[::-1]
            bonus = choice[b, node].item()
            emitted = [tokens[b, i].item() for i in path[1:]] + [bonus]
            pad = t.D + 1 - len(path)
            assert got.count[b].item() == len(path) and got.bonus[b].item() == bonus
            assert got.path[b].tolist() == path + [node] * pad
            assert got.emitted[b].tolist() == emitted + [bonus] * pad


V, DEN = 3, 16
WEIGHTS = [(16, 0, 0), (9, 4, 3), (14, 1, 1), (11, 5, 0), (8, 8, 0), (6, 5, 5), (2, 7, 7), (13, 2, 1)]


@functools.cache
def weights(context, which):
    """Sixteenths of a context-dependent distribution over V tokens, with zeros, ties and sure tokens."""
    rng = random.Random(f"{which} {context}")
    row = list(rng.choice(WEIGHTS))
    rng.shuffle(row)
    return tuple(row)


@functools.cache
def rational(context, which):
    return tuple(Fraction(w, DEN) for w in weights(context, which))


def assert_distribution_is_the_target(blocks, length, equal):
    """blocks: probability of each emitted block. Continued by the target itself to `length` tokens, all
    strings must have exactly the target's probabilities."""
    for string in itertools.product(range(V), repeat=length):
        want, got = Fraction(1), 0
        for i in range(length):
            want *= rational(string[:i], "target")[string[i]]
        for n in range(1, length + 1):
            share = blocks.get(string[:n], 0)
            if share:
                rest = Fraction(1)
                for i in range(n, length):
                    rest *= rational(string[:i], "target")[string[i]]
                got += share * rest
        assert equal(got, want), (string, float(got), float(want))


def check_accept_distribution(impl, drafted=6):
    """Choice-and-walk that is not lossless on any of the 197 trees with up to 6 drafted nodes. Exact: all choice vectors
    of a tree through accept(), weighted by the target, sum to the target."""
    rng = random.Random(4)
    for s in all_trees(drafted):
        t = impl.tree_tables([s])
        for _ in range(2):
            tokens = [rng.randrange(V) for _ in range(s.N)]
            context = [()]
            for i in range(1, s.N):
                context.append((*context[s.parent[i]], tokens[i]))
            distinct = sorted(set(context))
            vectors = torch.tensor(list(itertools.product(range(V), repeat=len(distinct))))
            probs = torch.tensor([weights(c, "target") for c in distinct])  # of the shared denominator 16
            mass = probs.gather(1, vectors.T).prod(0)  # <= 16^7: exact in int64
            vectors, mass = vectors[mass > 0], mass[mass > 0]
            choice = vectors[:, [distinct.index(c) for c in context]]
            many = copies(t, len(mass))
            got = run_accept(impl, many, torch.tensor([tokens]).expand_as(choice), choice)
            assert torch.equal(got.emitted.gather(1, got.count[:, None] - 1)[:, 0], got.bonus)
            key = torch.cat([got.count[:, None], got.emitted], 1)
            rows, index = key.unique(dim=0, return_inverse=True)
            total = torch.zeros(len(rows), dtype=torch.int64).index_add(0, index, mass)
            blocks = {}
            for row, w in zip(rows.tolist(), total.tolist(), strict=True):
                blocks[tuple(row[1 : 1 + row[0]])] = Fraction(w, DEN ** len(distinct))
            assert sum(blocks.values()) == 1
            assert_distribution_is_the_target(blocks, s.D + 1, lambda a, b: a == b)


# ----------------------------------------------------------------------------------------------- multi-round


def normed(row):
    """A distribution in rationals, or zeros if nothing is left."""
    return [a / sum(row) for a in row] if sum(row) else list(row)


def residual(p, q):
    return normed([max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)])


def without(q, x):
    return normed([Fraction(0) if v == x else a for v, a in enumerate(q)])


@functools.cache
def rounds(p, q, tokens, replacement):
    """The rule at one node in rationals: the acceptance probability of each drawn child (None if it cannot be
    reached or drawn), and what is left of p when all are rejected (None if that cannot happen)."""
    ratios, reached = [], True
    for x in tokens:
        if not reached or q[x] == 0:
            ratios.append(None)
        else:
            ratios.append(min(Fraction(1), p[x] / q[x]))
            reached = ratios[-1] < 1
            if reached:
                p = residual(p, q)
        q = q if replacement else without(q, x)
    return ratios, p if reached else None


def draws(q, k, replacement):
    """All draws of k children with their probability; with no token left it is one with q' = 0."""
    if k == 0:
        yield (), Fraction(1)
        return
    if not any(q):
        yield (0,) * k, Fraction(1)
        return
    for x in range(V):
        if q[x]:
            for more, w in draws(q if replacement else without(q, x), k - 1, replacement):
                yield (x, *more), q[x] * w


def drafts(s, replacement):
    """All drafts of a static tree: tokens per node, contexts per node, probability."""

    def grow(node, tokens, context, weight):
        if node == s.N:
            yield tokens, context, weight
            return
        kids = [i for i in range(1, s.N) if s.parent[i] == node]
        for drawn, w in draws(rational(context[node], "draft"), len(kids), replacement):
            more = dict(zip(kids, drawn, strict=True))
            below = {i: (*context[node], x) for i, x in more.items()}
            yield from grow(node + 1, tokens | more, context | below, weight * w)

    return grow(0, {0: 0}, {0: ()}, Fraction(1))


def check_multi_round_distribution(impl, replacement, drafted=5):
    """A verifier that follows the paper on paper only: integrated in float64 over all drafts and both sides of every
    threshold, the code gives the target's distribution."""
    run_order = lambda s: [0, *(i for level in s.levels for i in level)]  # noqa: E731
    for s in all_trees(drafted):
        t = impl.tree_tables([s])
        kids = {i: [j for j in range(1, s.N) if s.parent[j] == i] for i in range(s.N)}
        per_draft, counts, u, mass = {"tokens": [], "p": [], "q": []}, [], [], []
        for tokens, context, weight in drafts(s, replacement):
            options = {0: [(0.5, 1.0)]}
            for i in range(s.N):
                drawn = tuple(tokens[j] for j in kids[i])
                distributions = rational(context[i], "target"), rational(context[i], "draft")
                for j, ratio in zip(kids[i], rounds(*distributions, drawn, replacement)[0], strict=True):
                    ratio = 0.5 if ratio is None else float(ratio)
                    sides = [(ratio - 1e-9, ratio), (ratio + 1e-9, 1 - ratio)]
                    options[j] = [side for side in sides if side[1] > 0]
            combos = list(itertools.product(*(options[i] for i in range(s.N))))
            u += [[u for u, _ in combo] for combo in combos]
            mass += [float(weight) * math.prod(w for _, w in combo) for combo in combos]
            counts.append(len(combos))
            per_draft["tokens"].append([tokens[i] for i in range(s.N)])
            per_draft["p"].append([[w / DEN for w in weights(context[i], "target")] for i in range(s.N)])
            per_draft["q"].append([[w / DEN for w in weights(context[i], "draft")] for i in run_order(s)])
        tokens, p, q = (torch.tensor(x).repeat_interleave(torch.tensor(counts), 0) for x in per_draft.values())
        u, mass = torch.tensor(u, dtype=torch.float64), torch.tensor(mass, dtype=torch.float64)
        many = copies(t, len(mass))
        path, count, distribution = impl.multi_round_walk(tokens, many, p.double(), q.double(), u, replacement)
        assert torch.allclose(distribution.sum(-1), torch.ones_like(mass))
        key = torch.cat([count[:, None], tokens.gather(1, path)], 1)
        key = key.where(torch.arange(t.D + 2) <= count[:, None], 0)
        rows, index = key.unique(dim=0, return_inverse=True)
        total = torch.zeros(len(rows), V, dtype=torch.float64).index_add(0, index, mass[:, None] * distribution)
        blocks = {}
        for row, share in zip(rows.tolist(), total.tolist(), strict=True):
            for y in range(V):
                blocks[*row[2 : 1 + row[0]], y] = share[y]
        assert_distribution_is_the_target(blocks, s.D + 1, lambda a, b: abs(a - float(b)) < 1e-9)


def copies(t, n):
    """Tables of one tree for a batch of n."""
    grow = lambda x: x.expand(n, *x.shape[1:]) if isinstance(x, torch.Tensor) else x  # noqa: E731
    return type(t)(**{name: grow(value) for name, value in t.__dict__.items()})


def sequential_multi_round(s, valid, tokens, p, q, u, replacement):
    """Algorithm 1 for one sequence in rationals: path and distribution of the bonus. q: draft distribution by node."""
    path = [0]
    while True:
        distribution, left, here = p[path[-1]], q.get(path[-1]), None
        for child in (j for j in range(1, s.N) if s.parent[j] == path[-1]):
            if not valid[child]:
                continue
            x = tokens[child]
            if left[x] and u[child] < distribution[x] / left[x]:
                here = child
                break
            if left[x]:
                distribution = residual(distribution, left)
            left = left if replacement else without(left, x)
        if here is None:
            return path, distribution
        path.append(here)


def check_multi_round_twin(impl):
    """A decision taken with the wrong threshold, or a residual that differs, on any of 960 random trees: decision by
    decision on a dense grid of uniforms, with invalid nodes."""
    rng = random.Random(5)
    for case in range(60):
        replacement = bool(case % 2)
        trees = [random_tree(rng, most=9, bias=rng.random()) for _ in range(16)]
        t = impl.tree_tables(trees)
        tokens, p, q, u, want = [], [], [], [], []
        valid = torch.ones(len(trees), t.N, dtype=torch.bool)
        for b, s in enumerate(trees):
            distribution = lambda: rational(rng.random(), "any")  # noqa: E731
            distributions = [distribution() for _ in range(t.N)]
            draft_distributions = {i: distribution() for i in range(s.N) if i in s.parent}
            if not replacement and case % 3 == 0:  # invalid nodes; siblings after them are tried without them
                valid[b, 1 + rng.randrange(t.N) :] = False
            drawn = [0] * t.N
            for i in draft_distributions:
                kids, left = [j for j in range(1, s.N) if s.parent[j] == i], draft_distributions[i]
                for j in kids:
                    options = [v for v in range(V) if left[v]]
                    drawn[j] = rng.choice(options) if options else rng.randrange(V)
                    left = left if replacement else without(left, drawn[j])
            grid = [Fraction(rng.randrange(64), 64) + Fraction(1, 10007) for _ in range(t.N)]
            args = (s, valid[b].tolist(), drawn, distributions, draft_distributions, grid, replacement)
            want.append(sequential_multi_round(*args))
            rows = [[0.0] * V for _ in range(t.run_rows)]
            for j in range(1, s.N):
                rows[t.source_row[b, j]] = [float(x) for x in draft_distributions[s.parent[j]]]
            tokens.append(drawn)
            p.append([[float(x) for x in row] for row in distributions])
            q.append(rows)
            u.append([float(x) for x in grid])
        t = impl.TreeTables(**{**t.__dict__, "valid": t.valid & valid})
        p, q, u = (torch.tensor(x, dtype=torch.float64) for x in (p, q, u))
        tokens = torch.tensor(tokens)
        path, count, distribution = impl.multi_round_walk(tokens, t, p, q, u, replacement)
        noise = torch.zeros(len(trees), V, dtype=torch.float64)
        got = impl.multi_round(tokens, t, p, q, u, noise, replacement)
        assert torch.equal(got.path, path) and torch.equal(got.count, count)
        for b, (nodes, left) in enumerate(want):
            pad = t.D + 1 - len(nodes)
            assert count[b].item() == len(nodes) and path[b].tolist() == nodes + nodes[-1:] * pad
            assert distribution[b].tolist() == pytest.approx([float(x) for x in left], abs=1e-12)
            bonus = distribution[b].argmax().item()  # no noise: the likeliest token
            assert got.bonus[b].item() == bonus
            assert got.emitted[b].tolist() == [tokens[b, i].item() for i in nodes[1:]] + [bonus] * (pad + 1)


CHECKS = {
    "ancestors": check_ancestors,
    "dynamic": check_dynamic,
    "parents survive": check_parents_survive,
    "accept walk": check_accept_walk,
    "accept distribution": check_accept_distribution,
    "multi-round distribution": functools.partial(check_multi_round_distribution, replacement=False),
    "with replacement": functools.partial(check_multi_round_distribution, replacement=True),
    "multi-round twin": check_multi_round_twin,
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_real_code_passes(name):
    """The bugs that the checks name."""
    CHECKS[name](real)


def test_multi_round_accepts_a_perfect_draft():
    """Rounding in u * q < p must never reject when draft and target agree, whatever the uniform."""
    t = tree_tables([chain(4)] * 64)
    distribution = torch.rand(64, 1, 7).softmax(-1)
    u = torch.full((64, 5), 1 - 2**-24)
    tokens = torch.randint(0, 7, (64, 5), generator=torch.Generator().manual_seed(0))
    got = verify.multi_round(
        tokens, t, distribution.expand(-1, 5, -1), distribution.expand(-1, 4, -1), u, torch.zeros(64, 7), True
    )
    assert (got.count == 5).all() and torch.equal(got.emitted[:, :4], tokens[:, 1:])


def test_multi_round_survives_degenerate_drafts():
    """NaN or empty draft distributions, and a residual that rounds to nothing, must not reach the output."""
    t = tree_tables([StaticTree(((0,), (1,)))] * 4)
    p = torch.tensor([0.5, 0.25, 0.25]).expand(4, 3, 3)
    q = torch.tensor([[math.nan] * 3, [0.0] * 3, [0.25, 0.5, 0.25], [1.0, 0.0, 0.0]])[:, None]
    tokens = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 1], [0, 1, 2]])
    noise = torch.tensor([0.0, 0.0, 9.0]).expand(4, 3)
    for replacement in (False, True):
        got = verify.multi_round(tokens, t, p, q, torch.full((4, 3), 0.99), noise, replacement)
        assert got.count.tolist() == [1] * 4
        assert got.bonus.tolist() == [2, 2, 0, 2]  # row 2: only token 0 is left in the residual
    p = torch.tensor([1.0, 0.0]).expand(1, 3, 2)  # an unnormalised draft distribution that leaves no residual at all
    q = torch.tensor([1.5, 0.5]).expand(1, 1, 2)
    t = tree_tables([StaticTree(((0,), (1,)))])
    got = verify.multi_round(torch.tensor([[0, 1, 1]]), t, p, q, torch.full((1, 3), 0.9), torch.zeros(1, 2), True)
    assert got.bonus.tolist() == [0]


# ---------------------------------------------------------------------------------------------------- mutants

LATE = "flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :count].neg() + scores.shape[-1] - 1"
MUTANTS = {
    "accept: parent off by one": (
        "accept distribution", "choice.gather(1, parent)", "choice.gather(1, (parent - 1).clamp(min=0))"),
    "accept: child without parent": (
        "accept distribution", "(match[:, None] | ~ancestors).all(-1)", "match"),
    "accept: invalid nodes count": (check_accept_walk, "(valid & (tokens == ", "((tokens == "),
    "accept: first instead of deepest": (check_accept_walk, "depth.where(ok, -1)", "ok.long()"),
    "multi-round: residual not zeroed": (
        "distribution", "distribution = torch.where(replace, normalize",
        "distribution = torch.where(replace & False, normalize"),
    "multi-round: bonus from the wrong row": (
        "distribution", "torch.where(moved[:, None], p[b, node], distribution)",
        "torch.where(moved[:, None], p[b, tables.parent[b, node]], distribution)"),
    "multi-round: parent off by one": (
        "distribution", "left = q[b, tables.source_row[b, children[:, 0]]]",
        "left = q[b, tables.source_row[b, node]]"),
    "multi-round: draft distribution not renormalised": (
        "distribution", "left = normalize(left.scatter(1, x[:, None], 0), p=1, dim=-1, eps=1e-30)",
        "left = left.scatter(1, x[:, None], 0)"),
    "multi-round: acceptance ignores the draft": ("distribution", "(u[b, child] * qx < px)", "(u[b, child] < px)"),
    "multi-round: one uniform for all nodes": (check_multi_round_twin, "u[b, child]", "u[b, node]"),
    "multi-round: goes on after a full rejection": (check_multi_round_twin, "walking & ~moved", "~moved"),
    "dynamic: parent off by one": (
        check_dynamic, "torch.searchsorted(flat, above) + 1)", "torch.searchsorted(flat, above))"),
    "dynamic: ties to the higher id": (
        check_dynamic, "sort(dim=-1, descending=True, stable=True).indices[..., :count]", LATE),
    "dynamic: scores not cumulative": (
        check_dynamic, "torch.minimum(_usable(_usable(scores) + base), base)", "_usable(scores)"),
    "dynamic: feature of the wrong row": (
        check_dynamic, "source=best // K,", "source=best % K,"),
    "dynamic: a child may outscore its parent": (
        check_parents_survive, "torch.minimum(_usable(_usable(scores) + base), base)",
        "_usable(_usable(scores) + base)"),
    "dynamic: NaN is the best score": (
        check_parents_survive, "return scores.where(~scores.isnan(), -torch.inf)", "return scores"),
    "ancestors: one doubling too few": (
        check_ancestors, "range(D.bit_length())", "range(D.bit_length() - 1)"),
    "tables: source row off by one": ("tables", "(i, run_rows + w)", "(i, run_rows + w - 1)"),
    "tables: padding rows see the tree": (
        "tables", "visible &= seen_live[:, None] & live[..., None]", "visible &= True"),
}  # fmt: skip


SHORT = {
    "distribution": lambda impl: [check_multi_round_distribution(impl, r, drafted=3) for r in (False, True)],
    "accept distribution": functools.partial(check_accept_distribution, drafted=4),
    "tables": functools.partial(check_tables, trees=[PAPER25, chain(3), StaticTree(())]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    """A test suite that would not notice the named bug."""
    check, old, new = MUTANTS[name]
    broken = mutant(old, new)
    with pytest.raises(AssertionError):
        SHORT.get(check, check)(broken)


# ------------------------------------------------------------------------------------- what a step may run


def files_run(call):
    """The names of the files whose functions run in call()."""
    found = set()

    def profile(frame, event, argument):
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
