"""eagle_draft.py: the head against explicit arithmetic, trees against brute force, the draft cache, acceptance."""

import dataclasses
import functools
import math
import shutil
from types import SimpleNamespace

import pytest
import tiny
import torch
from block_kit import tiny_block
from tiny import DRAFT_VOCAB, MEDUSA, PROMPT, V, eagle_engine, load_config, node_paths, tiny_head, tiny_model, watch

import kernels
import tree as trees
from decoding import sampling
from decoding.drafter import take_rows
from decoding.params import SamplingParams
from eagle_draft import EagleHead
from engine.engine import Engine
from engine.load import load
from loading.drafting import draft_vocabulary
from loading.options import DEMO
from text.tokenizer import load_tokenizer
from weights.head_reader import read_eagle
from weights.quantized import QuantSpec, pack_
from weights.rounding import quantize_

# ------------------------------------------------------------------ the head, written out once more


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, theta):
    """x [rows, heads, hd] at positions 0, 1, ...: half rotation as Hugging Face does it (tables in float32)."""
    rows, _, size = x.shape
    inverse = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    angles = torch.arange(rows).float()[:, None] * inverse
    cos, sin = (torch.cat((t, t), -1)[:, None] for t in (angles.cos(), angles.sin()))
    half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
    return x * cos + half * sin


class Reference:
    """The published head with Hugging Face's separate tensors: no cache, no tree, one path at a time."""

    def __init__(self, head: EagleHead):
        c, g, t = head.config, head.config.layer, dict(head.state_dict())
        self.c, self.g, self.t, self.target = c, g, t, head.target
        sizes = [n * g.head_dim for n in (g.num_attention_heads, g.num_key_value_heads, g.num_key_value_heads)]
        self.qkv = t["layer.attention.qkv.weight"].split(sizes)
        zero = torch.zeros(sum(sizes), dtype=head.target.dtype)
        self.qkv_bias = t.get("layer.attention.qkv.bias", zero).split(sizes)
        self.gate, self.up = t["layer.mlp.gate_up.weight"].chunk(2)
        self.embedding = t.get("embed_tokens.weight", head.target.embed_tokens.weight)
        self.ids = t.get("draft_ids", torch.arange(head.target.config.vocab_size))

    def fuse(self, features):
        if self.c.version == 1:
            return features
        eps, H = self.g.rms_norm_eps, self.c.target_hidden_size
        if self.c.fc_norm:
            parts = features.split(H, -1)
            features = torch.cat([rms(p, self.t[f"fc_norms.{i}.weight"], eps) for i, p in enumerate(parts)], -1)
        if self.c.norm_before_fc:
            features = rms(features, self.t["input_norm.weight"], eps)
        return features @ self.t["fc.weight"].T + self.t.get("fc.bias", 0)

    def rows(self, tokens, features):
        """(output, keys, values) of rows that pair tokens [R] with features [R, H], under full causal attention."""
        t, g, eps = self.t, self.g, self.g.rms_norm_eps
        e = self.embedding[tokens]
        if self.c.version == 1:
            x = residual = torch.cat((e, features), -1) @ t["fc.weight"].T + t.get("fc.bias", 0)
        else:
            normed = rms(features, t["layer.hidden_norm.weight"], eps)
            x = torch.cat((rms(e, t["layer.input_norm.weight"], eps), normed), -1)
            residual = normed if self.c.norm_before_residual else features
        q, k, v = ((x @ w.T + b).view(len(x), -1, g.head_dim) for w, b in zip(self.qkv, self.qkv_bias, strict=True))
        q, k = rotate(q, g.rope.theta), rotate(k, g.rope.theta)
        attended = []
        for h in range(g.num_attention_heads):
            kv = h // (g.num_attention_heads // g.num_key_value_heads)
            scores = q[:, h] @ k[:, kv].T / math.sqrt(g.head_dim)
            scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -math.inf)
            attended.append(scores.softmax(-1) @ v[:, kv])
        x = residual + torch.cat(attended, -1) @ t["layer.attention.o.weight"].T
        y = rms(x, t["layer.post_norm.weight"], eps)
        gated = torch.nn.functional.silu(y @ self.gate.T) * (y @ self.up.T)
        x = x + gated @ t["layer.mlp.down.weight"].T
        if self.c.norm_output:
            x = rms(x, t["norm.weight"], eps)
        return x, k, v

    def logits(self, output):
        weight = self.target.lm_head.weight
        if self.c.version == 1:
            return output @ weight[self.ids].T
        normed = output if self.c.norm_output else rms(output, self.t["norm.weight"], self.g.rms_norm_eps)
        return normed @ self.t.get("lm_head.weight", weight).T

    def true_features(self, ids):
        hidden, taps = self.target.forward_train(torch.tensor(ids)[None], self.c.taps)
        return self.fuse((hidden if taps is None else taps)[0])

    def after(self, ids, features, path):
        """Output of the last row when `path` is drafted after ids t_0..t_n; features of t_0..t_{n-1} are true."""
        tokens = torch.tensor(ids[1:])
        output, _, _ = self.rows(tokens, features)
        for token in path:
            tokens = torch.cat((tokens, torch.tensor([token])))
            features = torch.cat((features, output[-1:]))
            output, _, _ = self.rows(tokens, features)
        return output[-1]


class BruteForce:
    """Trees as Python lists, from the reference head's distribution after every path.

    A dynamic tree is ranked by scores with the shared noise. The scores of a static tree are the draft's own
    log-probabilities.
    """

    def __init__(self, head, ids, params: SamplingParams, noise: bool, ranked: bool = False):
        self.reference, self.ids, self.params = Reference(head), ids, params
        self.features = self.reference.true_features(ids[:-1])
        self.noise, self.ranked, self.known = noise, ranked, {}

    def distribution(self, path):
        """(keys, scores, target ids) of the children of the node at the end of `path`."""
        if path not in self.known:
            z = self.reference.logits(self.reference.after(self.ids, self.features, path))
            T, targets, keys = self.params.temperature, self.reference.ids, z
            scores = z.log_softmax(-1)
            if self.noise and T > 0:
                where = torch.tensor([[len(self.ids) + len(path)]])
                seed = torch.tensor([self.params.seed])
                keys = z + T * sampling.gumbel_noise(seed, where, targets)[0, 0]
                scores = (keys / max(T, 0.5)).log_softmax(-1) if self.ranked else scores
            self.known[path] = keys, scores, targets
        return self.known[path]

    def children(self, path, count):
        keys, scores, targets = self.distribution(path)
        best = keys.argsort(descending=True)[:count]
        return [(int(targets[i]), float(scores[i])) for i in best]

    def static(self, tree):
        """(path, cumulative score) of every node but the root, in the tree's order."""
        nodes = {(): ((), 0.0)}
        for ranks in tree.paths:
            path, score = nodes[ranks[:-1]]
            token, gained = self.children(path, ranks[-1] + 1)[-1]
            nodes[ranks] = (*path, token), score + gained
        return [nodes[ranks] for ranks in tree.paths]

    def dynamic(self, tree):
        """EAGLE-2 as the paper describes it: pool, frontier, re-ranking."""
        pool = [((token,), score) for token, score in self.children((), tree.topk)]
        frontier = list(pool)
        for _ in range(tree.depth):
            new = [((*p, t), s + g) for p, s in frontier for t, g in self.children(p, tree.topk)]
            pool += new
            frontier = sorted(new, key=lambda node: -node[1])[: tree.topk]
        order = sorted(range(len(pool)), key=lambda i: (-pool[i][1], i))[: tree.N - 1]
        return [pool[i] for i in sorted(order)]


def record(engine: Engine):
    """Every step's (committed ids per row, count, Draft) of the engine's next runs, as the drafter saw them."""
    seen = []

    def see(inputs, draft):
        ids = [row[: n + 1] for row, n in zip(inputs.tokens.tolist(), inputs.n.tolist(), strict=True)]
        seen.append((ids, inputs.count.clone(), draft))

    watch(engine.drafter, "draft", see)
    return seen


HEADS = {
    "eagle1": dict(version=1),
    "eagle1 no bias, trimmed": dict(version=1, fc_bias=False, vocab=DRAFT_VOCAB),
    "eagle1 qkv bias, own embedding, MHA": dict(version=1, qkv_bias=True, has_embed=True, num_key_value_heads=4),
    "eagle3": dict(version=3, vocab=DRAFT_VOCAB),
    "eagle3 one KV head, shared lm_head": dict(version=3, num_key_value_heads=1, has_lm_head=False),
    "eagle3 residual after norm, fc_norm": dict(
        version=3, vocab=DRAFT_VOCAB, norm_before_residual=True, fc_norm=True, fc_bias=True
    ),
    "eagle3.1": dict(version=3, vocab=DRAFT_VOCAB, norm_before_residual=True, fc_norm=True, norm_output=True),
    "eagle3 norm_before_fc, norm_output, own embedding": dict(
        version=3, norm_before_fc=True, norm_output=True, has_embed=True, qkv_bias=True, head_dim=16
    ),
}
SHAPES = {"paper25": trees.PAPER25, "dynamic": trees.DynamicTree(14, 3, 4)}


def check_drafts(head, tree, params, shared_noise=True, steps=4):
    engine = eagle_engine(head, tree, shared_noise=shared_noise)
    seen = record(engine)
    engine.generate(PROMPT, params).run()
    most = max(range(len(seen)), key=lambda i: int(seen[i][1]))  # a step after a long acceptance
    for ids, _, draft in seen[:steps] + [seen[most]]:
        dynamic = isinstance(tree, trees.DynamicTree)
        brute = BruteForce(head, ids[0], params, shared_noise, ranked=dynamic)
        expected = brute.dynamic(tree) if dynamic else brute.static(tree)
        got = [(path, float(draft.scores[0, i])) for i, path in node_paths(draft, 0).items()]
        assert [path for path, _ in got] == [path for path, _ in expected]
        assert max(abs(a[1] - b[1]) for a, b in zip(got, expected, strict=True)) < 1e-6
    return max(int(count) for _, count, _ in seen)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", HEADS)
def test_drafted_tree_is_the_brute_force_one(kind, shape):
    """A wrong norm, residual, bias, KV head, mask, position, feature or re-ranking in the head: output stays right,
    acceptance silently falls. Greedy and sampled (shared noise), also after re-feeding several accepted tokens."""
    options = dict(HEADS[kind])
    head = tiny_head(tiny_model(), options.pop("version"), options.pop("vocab", None), **options)
    assert all((p - 1).abs().max() > 0.01 for p in head.parameters() if p.dim() == 1)  # a dropped norm would show
    greedy = SamplingParams(max_new_tokens=5)
    sampled = SamplingParams(temperature=3.0, seed=3, max_new_tokens=16)  # the shared noise makes drafts right
    check_drafts(head, SHAPES[shape], greedy, steps=2)
    assert check_drafts(head, SHAPES[shape], sampled, steps=2) > 1


def test_noise_off_drafts_the_official_tree():
    """`--draft-noise off` must ignore temperature and noise, as the official EAGLE-2/3 drafting does."""
    head = tiny_head(tiny_model())
    params = SamplingParams(temperature=1.3, seed=5, top_k=7, max_new_tokens=8)
    for tree in (SHAPES["dynamic"], MEDUSA):
        check_drafts(head, tree, params, shared_noise=False)


@pytest.mark.parametrize("version", (1, 3))
def test_whole_sequence_forward_equals_the_reference(version):
    """Training and decoding must be the same function: a head trained on another one drafts badly."""
    model = tiny_model()
    head = tiny_head(model, version, DRAFT_VOCAB if version == 3 else None)
    reference, ids = Reference(head), [(7 * i + 3) % V for i in range(30)]
    features = reference.true_features(ids[:-1])
    expected = reference.rows(torch.tensor(ids[1:]), features)[0]
    got = head.forward_train(torch.tensor([ids[1:]]), features[None])
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(head.predict(got)[0], reference.logits(expected), rtol=0, atol=1e-9)


# ------------------------------------------------------------------ the draft cache


def check_cache(engine, ids, rows, row=0):
    """Rows [0, rows) of the draft cache equal one pass over the true features of `ids`."""
    reference = Reference(engine.drafter.head)
    features = reference.true_features(ids[:rows])
    _, k, v = reference.rows(torch.tensor(ids[1 : rows + 1]), features)
    got = engine.drafter.cache[:, row, :, :rows].transpose(1, 2)
    torch.testing.assert_close(got[0], k, rtol=0, atol=1e-9)
    torch.testing.assert_close(got[1], v, rtol=0, atol=1e-9)


def run_and_check_cache(engine, prompt, params):
    """A run; the stable draft rows are checked at every step, as the drafter leaves them."""
    seen, real = [], engine.drafter.draft

    def check(inputs, _draft):
        n = int(inputs.n[0])
        check_cache(engine, inputs.tokens[0, : n + 1].tolist(), n)
        seen.append(n)

    watch(engine.drafter, "draft", check)
    result = engine.generate(prompt, params).run()[0]
    engine.drafter.draft = real
    assert len(seen) == result.steps > 0
    return result


@pytest.mark.parametrize("version, shape, vocab", ((1, "paper25", None), (3, "dynamic", DRAFT_VOCAB)))
def test_incremental_cache_equals_one_pass(version, shape, vocab):
    """Tree rows that survive into the stable cache, accepted tokens not re-fed with true features, wrong positions. Draft
    row i holds token i+1: reusing it when the next prompt differs at token i+1 keeps a stale pair for good. The tokens
    stay right and acceptance is lost."""
    engine = eagle_engine(tiny_head(tiny_model(), version, vocab), SHAPES[shape])
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=16)
    first = run_and_check_cache(engine, PROMPT, params)
    assert max(map(len, first.tokens_per_step)) > 1  # several rows were re-fed at once
    text = PROMPT + first.token_ids
    for cut in (len(PROMPT), len(PROMPT) - 3, len(text) - 1, len(text)):  # where the new turn parts from the old
        again = text[:cut] + [(text[cut] + 1) % V if cut < len(text) else 5, 8, 2]
        result = run_and_check_cache(engine, again, params)
        assert result.cached_tokens == cut - 1 if cut <= len(PROMPT) else 0 < result.cached_tokens < cut
        run_and_check_cache(engine, PROMPT, params)
        text = PROMPT + engine.generate(PROMPT, params).run()[0].token_ids


# ------------------------------------------------------------------ acceptance of the machinery around a head


class OracleHead(EagleHead):
    """Knows the target: the output of a row is the true next feature, if every row it sees pairs the right feature with
    the right token at the right position, and zero otherwise. So acceptance is perfect if and only if the machinery is.

    Its cache rows hold (token, position, whether the row was fed rightly)."""

    first = PROMPT[0]  # token 0 is never fed to a head

    def fuse(self, features):
        return features

    def narrow_logits(self, output):
        if self.config.version == 1:
            return super().narrow_logits(output)
        logits = self.target.logits(self.target.norm(output))
        return logits if self.draft_ids is None else logits[..., self.draft_ids]

    def truth(self, ids):
        if ids not in self.__dict__.setdefault("_truth", {}):
            hidden, taps = self.target.forward_train(torch.tensor(ids)[None], self.config.taps)
            self._truth[ids] = (hidden if taps is None else taps)[0]
        return self._truth[ids]

    def absorb(self, tokens, feature, cos, sin, slots, kv):
        for b in range(tokens.shape[0]):
            for t, slot in enumerate(slots[b].tolist()):
                own = kv[0, b, 0, : slot + 1]
                own[slot, :3] = torch.tensor([tokens[b, t], slot, 0])
                turned = (table[slot] for table in (self.rotary.cos, self.rotary.sin))
                placed = all(map(torch.equal, (cos[b, t], sin[b, t]), turned))
                if placed and own[:, 1].tolist() == list(range(slot + 1)):
                    true = self.truth((self.first, *own[:, 0].long().tolist()))[-2]
                    own[slot, 2] = float(torch.allclose(feature[b, t], true, rtol=0, atol=1e-9))

    def forward(self, fed, kv, layer=None):
        tokens, feature, nodes, source = fed
        feature = feature if source is None else take_rows(feature, source)
        out = torch.zeros_like(feature)
        for b in range(tokens.shape[0]):
            start, region = int(nodes.start[b]), nodes.visible.shape[2]
            for t in range(tokens.shape[1]):
                own, slot = kv[0, b, 0], int(nodes.slots[b, t])
                own[slot, :3] = torch.tensor([tokens[b, t], nodes.positions[b, t], 1])
                seen = torch.cat((torch.arange(start), start + torch.arange(region)[nodes.visible[b, t]]))
                seen = seen.clamp(max=kv.shape[3] - 1)
                rows = own[seen][own[seen, 1].argsort(stable=True)]
                ids = (self.first, *rows[:, 0].long().tolist())
                if rows[:, 1].tolist() != list(range(len(rows))):
                    own[slot, 2] = 0
                    continue
                true = self.truth(ids)
                right = torch.allclose(feature[b, t], true[-2], rtol=0, atol=1e-9)
                own[slot, 2] = float(right)
                if right and bool(rows[:, 2].all()):
                    out[b, t] = true[-1]
        return out


def peaked_model():
    model = tiny_model(seed=2)
    model.lm_head.weight.mul_(6)
    return model


@functools.cache
def plain(params):
    """What the target decodes after PROMPT without a head."""
    return Engine(peaked_model()).generate(PROMPT, params).run()[0].token_ids


GREEDY = SamplingParams(max_new_tokens=22)
HOT = SamplingParams(temperature=8.0, seed=11, max_new_tokens=22)  # the noise decides


def oracle_engine(version=1, tree=None, vocab=None, **options):
    tree = trees.chain(4) if tree is None else tree
    head = tiny_head(peaked_model(), version, vocab, cls=OracleHead, **(dict(taps=(2,)) if version == 3 else {}))
    return eagle_engine(head, tree, **options)


def vocabulary(params):
    """Draft ids that hold every token of the plain run, so that only a wrong table can lower acceptance."""
    return torch.tensor(sorted({*plain(params), *range(2, V, 3)}))


def tau(engine, params=GREEDY):
    """Mean tokens per step, the truncated last step aside; the tokens must be plain decoding's."""
    result = engine.generate(PROMPT, params).run()[0]
    assert result.token_ids == plain(params)
    sizes = [len(ids) for ids in result.tokens_per_step[:-1]]
    return sum(sizes) / len(sizes)


@pytest.mark.parametrize("params", (GREEDY, HOT), ids=("greedy", "T=8"))
@pytest.mark.parametrize("version", (1, 3))
def test_a_perfect_head_is_accepted_whole(version, params):
    """Any slip in feature alignment, positions, masks, re-feeding, draft ids or noise costs acceptance, never output:
    with a head that knows the target every static tree must yield D+1 tokens in every step."""
    for tree in (MEDUSA, trees.PAPER25):
        assert tau(oracle_engine(version, tree), params) == tree.D + 1
    for vocab in (None, vocabulary(params)):
        assert tau(oracle_engine(version, vocab=vocab), params) == 5
        assert tau(oracle_engine(version, trees.DynamicTree(24, 4, 4), vocab), params) > 4


def test_batch_rows_of_a_perfect_head():
    """Rows of different lengths and trees: a row's drafts must use its own length, features, noise and cache."""
    shapes = [trees.chain(4), MEDUSA, trees.chain(2)]
    head = tiny_head(peaked_model(), cls=OracleHead)
    engine = eagle_engine(head, shapes, batch_size=3)
    prompts = [PROMPT, PROMPT[:5], PROMPT + PROMPT[:9]]
    results = engine.generate_batch(prompts, dataclasses.replace(HOT, temperature=1.0)).run()
    for result, tree in zip(results, shapes, strict=True):
        assert all(len(ids) == tree.D + 1 for ids in result.tokens_per_step[:-1])


@pytest.mark.parametrize("changes", ({}, {"logits_cap": 3.0}, {"logits_multiplier": 0.5}), ids=str)
def test_the_best_of_the_lm_head_are_not_taken_for_the_targets(changes, monkeypatch):
    """Scores of an LM head whose logits the target scales or caps: a dynamic tree ranks its nodes wrongly. So do the rows
    of that LM head that a trimmed vocabulary has, and so they meet the noise at another temperature."""
    model = tiny_model(torch.float32, **changes)
    ids, output = torch.tensor([3, 5, 8, 40]), torch.randn(2, 32)
    trimmed = tiny_head(model, vocab=ids)
    assert torch.allclose(trimmed.narrow_logits(output), tiny_head(model).narrow_logits(output)[:, ids], atol=1e-5)
    quantize_(model, QuantSpec("int8"))
    pack_(model, torch.float32)
    model.lm_head.packed = dataclasses.replace(model.lm_head.packed, layout="planes")  # as on a GPU
    monkeypatch.setattr(kernels, "packed_topk", lambda *args: "found")
    for head in (tiny_head(model), tiny_block(model, slots=5)):
        assert head.top(torch.zeros(1, 1, 32), 3) == (None if changes else "found")


# ------------------------------------------------------------------ penalties and filters on the draft side


def test_penalties_follow_the_drafted_path():
    """Draft penalties that miss the drafted path, or count in the wrong vocabulary, cost acceptance."""
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.8, frequency_penalty=1.5, presence_penalty=0.5, seed=2, max_new_tokens=40
    )
    for vocab in (None, vocabulary(params)):
        for tree in (trees.chain(4), MEDUSA):
            assert tau(oracle_engine(tree=tree, vocab=vocab), params) == tree.D + 1


# ------------------------------------------------------------------ multi-round: what is drawn, and how likely


def filtered(z, params):
    """softmax(z / T) of what top-k, then top-p keep, written out here."""
    order = z.argsort(descending=True)
    p = (z[order] / params.temperature).softmax(-1)
    if params.top_k:
        p[params.top_k :] = 0
        p = p / p.sum()
    p = torch.where(p.cumsum(-1) - p < params.top_p, p, 0)
    return torch.zeros_like(p).scatter(0, order, p / p.sum())


FILTERS = {
    "top-k": SamplingParams(temperature=1.0, top_k=2, seed=3, max_new_tokens=8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.4, seed=3, max_new_tokens=8),
}


@pytest.mark.parametrize("distribution", FILTERS)
@pytest.mark.parametrize("rule", ("with", "without"))
def test_multi_round_draws_from_the_filtered_distribution(rule, distribution):
    """The draft's q without the filters: lossless all the same, but it spends children on tokens that the target's
    filters remove. And children behind the last survivor must be among the best by logit, not arbitrary ones."""
    params, tree = FILTERS[distribution], trees.PAPER25
    head = tiny_head(tiny_model(), vocab=DRAFT_VOCAB)
    head.target.lm_head.weight.mul_(2)
    head.finish()
    engine = eagle_engine(head, tree, multi_round=rule)
    seen = record(engine)
    engine.generate(PROMPT, params).run()
    few = 0
    for ids, _, draft in seen[:3]:
        brute, run_rows = BruteForce(head, ids[0], params, noise=False), [0, *sum(tree.levels, ())]
        paths = [(), *node_paths(draft, 0, twins=rule == "with").values()]
        for row, node in enumerate(run_rows):
            z, _, targets = brute.distribution(paths[node])
            q = filtered(z, params)
            expected = torch.zeros(V, dtype=q.dtype).index_copy(0, targets, q)
            torch.testing.assert_close(draft.q[0, row], expected, rtol=0, atol=1e-8)
            children = [int(draft.tokens[0, i]) for i in range(1, tree.N) if tree.parent[i] == node]
            alive = int((q > 0).sum())
            assert all(expected[x] > 0 for x in children[: alive if rule == "without" else None])
            if rule == "without":
                best = targets[z.argsort(descending=True)[: max(alive, tree.max_children)]].tolist()
                assert len({*children}) == len(children) and {*children} <= {*best}
                few += alive < len(children)
    assert rule == "with" or few > 3, "no node has more children than survivors"


@pytest.mark.parametrize("rule, vocab", [("with", None), ("without", DRAFT_VOCAB)], ids=("full", "trimmed"))
def test_greedy_multi_round_accepts_what_match_accepts(rule, vocab):
    """At T = 0 a one-hot q leaves every child but the first undrawable: arbitrary siblings, never accepted."""
    head, params, sizes = tiny_head(peaked_model(), vocab=vocab), SamplingParams(max_new_tokens=24), []
    for tree in (MEDUSA, trees.PAPER25):
        match = eagle_engine(head, tree).generate(PROMPT, params).run()[0]
        ours = eagle_engine(head, tree, multi_round=rule).generate(PROMPT, params).run()[0]
        assert ours.tokens_per_step == match.tokens_per_step
        sizes += map(len, match.tokens_per_step)
    assert max(sizes) > 1


# ------------------------------------------------------------------ a trimmed draft vocabulary


class Pieces:
    """A sentencepiece-like vocabulary: control tokens, fallback bytes, merged pieces by rank, characters last."""

    texts = ["<unk>", "<s>", "\0", "\n", "a", "\ufffd", "the", "ing", "self", "ab", "e", "a", ",", "(", "</s>"]
    eos_ids, special_ids = (14,), frozenset((0, 1, 14))

    def decode(self, ids, skip_special, continuation):
        assert not skip_special and continuation
        return "".join(self.texts[i] for i in ids)

    def encode(self, text):
        return [self.texts.index(word) for word in text.split()]


def chosen(K, tokenizer=None, text=None, V=15):
    opts = SimpleNamespace(draft_vocab=K, draft_vocab_text=text)
    config = SimpleNamespace(vocab_size=V, eos_token_ids=(14,))
    return draft_vocabulary(opts, config, tokenizer).tolist()


def test_a_draft_vocabulary_without_text_holds_stops_and_characters(tmp_path):
    """The first K ids of a sentencepiece model: no `,`, no `(`, no newline and no end of text, but 256 fallback bytes."""
    assert chosen(1, Pieces()) == [14]
    assert chosen(4, Pieces()) == [3, 6, 7, 14]  # a quarter characters: the rest is pieces
    assert chosen(10, Pieces()) == [3, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert chosen(15, Pieces()) == list(range(15))
    assert chosen(3) == [0, 1, 14]  # without a tokenizer
    text = tmp_path / "text"
    text.write_text("self self ab ab e")
    assert chosen(3, Pieces(), str(text)) == [8, 9, 14], "a stop id that the text does not hold"
    assert chosen(5, Pieces(), str(text)) == [3, 8, 9, 10, 14], "uncounted tokens follow by the tokenizer's order"
    demo = load_tokenizer(DEMO, 4096)
    kept = chosen(1024, demo, V=4096)
    assert len(kept) == 1024 and sorted({*demo.eos_ids, *kept}) == kept
    assert {demo.encode(c, add_bos=False)[-1] for c in "x,.(=[]:\n\t\"'_)"} <= {*kept}


def test_a_draft_vocabulary_without_text_keeps_acceptance():
    """The demo head at a quarter of its vocabulary lost up to half its acceptance by losing the punctuation."""
    params, taus = SamplingParams(max_new_tokens=64), {}
    for K in (0, 1024):
        options = dict(draft_vocab=K, tree="paper25", ctx=256, eagle_always=True)
        engine = load(DEMO, eagle=str(DEMO / "eagle1"), **options)
        prompts = tiny.held_out_prompts(engine.tokenizer, 3, 96)
        steps = [len(ids) for p in prompts for ids in engine.generate(p, params).run()[0].tokens_per_step]
        taus[K] = sum(steps) / len(steps)
    assert taus[1024] > 0.85 * taus[0], taus


# ------------------------------------------------------------------ a head without its config


def test_a_bare_eagle3_head_says_all_it_assumes(tmp_path):
    """norm_before_residual and the aux layers assumed in silence: the demo's head then accepts a third of its tokens."""
    file = tmp_path / "head3.safetensors"
    shutil.copy(DEMO / "eagle3" / "model.safetensors", file)
    target, aux = load_config(DEMO), "eagle_aux_hidden_state_layer_ids"
    basics = {"head_dim": "64", "rope_theta": "10000", "rms_norm_eps": "1e-5"}
    (note,) = read_eagle(file, target, basics).notes
    assert f"assumed norm_before_residual false, {aux} [2, 4, 5] (" in note and "--eagle-config KEY=VALUE" in note
    (note,) = read_eagle(file, target, basics | {aux: "[2, 5, 8]"}).notes
    assert "norm_before_residual false" in note and aux not in note
    read = read_eagle(file, target, basics | {aux: "[2, 5, 8]", "norm_before_residual": "true"})
    assert "assumed nothing" in read.notes[0]
    assert (read.config.taps, read.config.norm_before_residual) == ((2, 5, 8), True)
    shutil.copy(DEMO / "eagle1" / "model.safetensors", file)
    (note,) = read_eagle(file, target).notes
    assert "head_dim 64" in note and "norm_before_residual" not in note and aux not in note
