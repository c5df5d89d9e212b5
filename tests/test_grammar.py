"""Grammars: which tokens may follow each node of a tree, the same tokens with every drafter, and texts that are valid."""

import json
from functools import partial

import pytest
import torch
from test_engine import HEADS, MEDUSA, MODEL, PROMPTS
from test_runner import with_graphs
from tiny import TREES, PieceTokenizer, ScriptedDrafter, definitions, eagle_engine, rules

from decoding import sampling
from decoding.params import SamplingParams, Thought
from engine.engine import Engine, EngineConfig
from engine.grammar import Grammars, draft_forced
from engine.grammar_text import GrammarError, checked_grammar, json_grammar
from generate import load, main
from scripts.demo import DEMO
from support.errors import exit_code
from tree import chain

pytest.importorskip("llguidance")
STOP = 96


class Letters(PieceTokenizer):
    """A vocabulary of single characters, with some pairs behind them and an end token."""

    special_ids = frozenset({STOP})

    def __init__(self):
        letters = [bytes([c]) for c in range(32, 96)] + [bytes([c, c + 1]) for c in range(65, 90)]
        super().__init__(dict(enumerate([*letters, b"ab", b"bc", b'{"', b'":', b"a", b"b", b"c", b"<end>"])), (STOP,))
        self.ids = {piece: i for i, piece in self.pieces.items()}

    def encode(self, text: str, add_bos: bool = True, continuation: bool = False) -> list[int]:
        return [self.ids[char.encode()] for char in text]


LETTERS = Letters()
WORDS = ('start: (/[A-F]{2,7}/ "-")+ "STOP"', 'start: /[0-9]{3,12}/ "ABCDEFG" /[X-Z]{2,9}/', "start: /[A-Z]{18,60}/")


def words_engine(tree=None, kind="eagle1", batch_size=1) -> Engine:
    if tree is None:
        return Engine(MODEL, LETTERS, config=EngineConfig(batch_size=batch_size))
    return eagle_engine(HEADS[kind], tree, batch_size=batch_size, tokenizer=LETTERS)


def request(grammar: str, temperature: float = 1.0, **more) -> SamplingParams:
    return SamplingParams(temperature=temperature, grammar=grammar, **({"seed": 5, "max_new_tokens": 40} | more))


def matches(grammar: str, ids: list[int]) -> bool:
    """Whether the grammar takes these ids, from a matcher that never saw a tree."""
    constraint = Grammars(LETTERS, len(LETTERS.pieces)).constraint(grammar, (STOP,))
    return constraint.matcher.try_consume_tokens(ids) == len(ids)


def allowed_ids(bits: torch.Tensor) -> set[int]:
    return {i for i in range(len(LETTERS.pieces)) if int(bits[i // 32]) >> (i % 32) & 1}


def test_nodes_of_a_tree_may_be_followed_by_what_their_own_path_allows():
    """The bits of each node are those of a fresh matcher that took the node's path; nodes that no grammar reaches allow
    all. A logit whose bit is 0 becomes -inf, and the others stay."""
    grammars = Grammars(LETTERS, len(LETTERS.pieces))
    a, b, c, dash = (LETTERS.ids[x] for x in (b"A", b"B", b"C", b"-"))
    tokens, parent = [0, a, b, b, 50, dash, c, STOP, a], [0, 0, 0, 1, 1, 3, 5, 3, 4]
    valid = [True] * 6 + [False, True, True]
    out = torch.full((9, 4), -1, dtype=torch.int32)
    constraint = grammars.constraint(WORDS[0], (STOP,))
    constraint.over_tree(tokens, parent, valid, out)
    for node, path in {0: [], 1: [a], 2: [b], 3: [a, b], 5: [a, b, dash]}.items():
        fresh = grammars.constraint(WORDS[0], (STOP,))
        fresh.take(path)
        want = {i for i in range(97) if i != STOP and fresh.matcher.validate_tokens([i])}
        assert allowed_ids(out[node]) == want and want, node
    assert all(out[node].eq(-1).all() for node in (4, 6, 7, 8))  # not allowed, not valid, the end, and below
    keep = torch.tensor([[i in allowed_ids(bits) for i in range(97)] for bits in out])
    logits = torch.randn(1, 9, 97)
    assert torch.equal(sampling.restrict(logits, out[None])[0], torch.where(keep, logits[0], float("-inf")))
    again = torch.full_like(out, -1)
    constraint.over_tree(tokens, parent, valid, again)
    assert torch.equal(out, again)
    fresh = grammars.constraint('start: "AB"', (STOP,))
    fresh.take([a, b])
    assert allowed_ids(fresh.allowed()) == {STOP}
    fresh.take([STOP, a])  # what comes after the end does not count


def test_forced_tokens_replace_the_least_likely_branch():
    """A forced path is drafted in the place of other nodes; one that is there already changes nothing."""
    parent, valid = [0, 0, 0, 1, 1, 2, 3], [True] * 7
    tokens = [9, 1, 2, 3, 4, 5, 6]
    assert not draft_forced([1, 3, 6], tokens, parent, valid) and tokens == [9, 1, 2, 3, 4, 5, 6]
    assert draft_forced([1, 7, 8, 7, 7], tokens, parent, valid) and tokens == [9, 1, 2, 7, 4, 5, 8]
    tokens = [9, 1, 2, 3, 4, 5, 6]
    assert draft_forced([7], tokens, [0, 0, 0, 0, 0, 0, 0], [True] * 6 + [False]) and tokens == [9, 1, 2, 3, 4, 7, 6]
    assert not draft_forced([7], [9], [0], [True]) and not draft_forced([], [9, 1], [0, 0], [True] * 2)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("grammar", WORDS)
def test_same_tokens_with_every_head_and_tree(grammar, kind):
    """The ids equal those of plain decoding for every head, tree and setting, and the grammar takes them."""
    settings = ({"temperature": 0.0}, {"top_p": 0.8, "top_k": 9}, {"repetition_penalty": 1.4, "frequency_penalty": 0.5})
    row, column = WORDS.index(grammar), list(HEADS).index(kind)  # every head and grammar meets all settings and trees
    params = request(grammar, max_new_tokens=24, **settings[(row + column) % 3])
    plain = words_engine().generate(PROMPTS[0], params).run()[0]
    assert matches(grammar, [i for i in plain.token_ids if i != STOP])
    assert plain.stop_reason == "length" or plain.token_ids[-1] == STOP
    tree = (MEDUSA, TREES["chain4"], TREES["dynamic"])[(row + 2 * column) % 3]
    result = words_engine(tree, kind).generate(PROMPTS[0], params).run()[0]
    assert result.token_ids == plain.token_ids and result.text == plain.text


THOUGHTS = {  # how a text may begin, with what a thought is closed after 7 tokens, and what must follow its own end
    "begun": Thought((), "ZZ", (33,), (58, 58, 33), 7),
    "may begin": Thought((34,), "ZZ", (), (58, 58), 7),
    "no limit": Thought((), "B", (33, 33), (34,), None),
}


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("grammar", [WORDS[1], ""])
def test_a_grammar_begins_behind_a_thought_with_every_tree(grammar, name):
    """A thought that the grammar forbids, one that goes on beyond its limit or is closed in the middle, other tokens with
    a drafter, a text that begins before the mark that must come first, and an end inside the thought."""
    thought = THOUGHTS[name]
    for seed in range(4):
        params = request(grammar, seed=seed, thought=thought, max_new_tokens=40)
        plain = words_engine().generate(PROMPTS[0], params).run()[0]
        tree = (MEDUSA, TREES["chain4"], TREES["dynamic"])[seed % 3]
        assert words_engine(tree).generate(PROMPTS[0], params).run()[0].token_ids == plain.token_ids, (seed, tree)
        ids, pieces = plain.token_ids, LETTERS.pieces
        if thought.begin and ids[0] != thought.begin[0]:
            behind = ids
        else:
            ids = ids[len(thought.begin) :]
            texts = [b"".join(pieces[i] for i in ids[: n + 1]) for n in range(len(ids))]
            ended = next((n + 1 for n, text in enumerate(texts) if thought.end.encode() in text), None)
            if grammar and ended is None:
                assert STOP not in ids
            if thought.most is not None:
                assert ended is None or ended <= 7 + len(thought.close) or not grammar
                if ended is None or ended > 7:  # the limit came first
                    assert tuple(ids[7 : 7 + len(thought.close)]) == thought.close
                    ended = 7 + len(thought.close)
                elif grammar:
                    assert tuple(ids[ended : ended + len(thought.gap)]) == thought.gap
                    ended += len(thought.gap)
            elif ended is not None and grammar:
                assert tuple(ids[ended : ended + 2]) == thought.gap[: len(ids) - ended]
                ended += 2
            behind = ids[ended:] if ended is not None else []
        assert not grammar or matches(grammar, [i for i in behind if i != STOP])


def test_multi_round_drafts_stay_as_they_were_drawn(monkeypatch):
    """With multi-round verification no forced token is written into the draft, and the grammar takes the text.

    Catches: a drafted token that did not come from the draft's own distribution, which biases what is accepted.
    """
    monkeypatch.setattr("engine.grammar.draft_forced", lambda *args: pytest.fail("a draft was changed"))
    engine = eagle_engine(HEADS["eagle1"], MEDUSA, tokenizer=LETTERS, multi_round="with")
    result = engine.generate(PROMPTS[0], request(WORDS[0], max_new_tokens=12)).run()[0]
    assert matches(WORDS[0], [i for i in result.token_ids if i != STOP]) and len(result.token_ids) > 2


def test_forced_spans_are_free_drafts():
    """With a drafter that is always wrong the tokens stay, and forced text gives a tau above 3."""
    grammar = 'start: /[XYZ]/ "ABCDEFGHIJKLMNOPQRSTUVW" /[XYZ]/'
    params = request(grammar)
    plain = words_engine().generate(PROMPTS[0], params).run()[0]
    hostile = ScriptedDrafter(chain(4), [[0] * 200], shift=70)
    result = Engine(MODEL, LETTERS, hostile).generate(PROMPTS[0], params).run()[0]
    assert result.token_ids == plain.token_ids and len(plain.token_ids) > 12 and result.tau > 3


def test_prompts_of_a_batch_with_and_without_a_grammar():
    """Each row of a batch has the ids that it has alone, and a later request has no mask."""
    rows = [request(WORDS[0]), SamplingParams(max_new_tokens=20), request(WORDS[1], 0.0)]
    alone = [words_engine().generate(*pair).run()[0].token_ids for pair in zip(PROMPTS, rows, strict=True)]
    for tree in (None, MEDUSA, TREES["dynamic"]):
        engine = words_engine(tree, "eagle3", batch_size=3)
        assert [r.token_ids for r in engine.generate_batch(PROMPTS, rows).run()] == alone
        assert engine.generate(PROMPTS[1], rows[1]).run()[0].token_ids == alone[1]  # the masks are gone


def test_two_graphs_hold_a_step():
    """The halves of a step are captured as two graphs, which serve all grammars with the right tokens."""
    for tree, grammars in ((MEDUSA, WORDS[:2]), (TREES["dynamic"], (WORDS[2], WORDS[0]))):
        engine = with_graphs(words_engine(tree))
        for seed, grammar in enumerate(grammars):
            params = request(grammar, seed=seed)
            want = words_engine().generate(PROMPTS[0], params).run()[0].token_ids
            assert engine.generate(PROMPTS[0], params).run()[0].token_ids == want
        assert {key[-1] for key in engine.runner.graphs} == {"draft", "verify"} and len(engine.runner.graphs) == 2


def test_what_would_end_the_process_is_an_error():
    """A schema of 1,000 definitions in a chain and a grammar of 3,000 rules are one-line errors, as text and in a
    request; a tenth of that is followed."""
    grammars = Grammars(LETTERS, len(LETTERS.pieces))
    for make, value in ((json_grammar, definitions(1000)), (checked_grammar, rules(3000))):
        with pytest.raises(GrammarError, match="too large, or nested too deeply") as error:
            make(value)
        assert "\n" not in str(error.value) and exit_code(error.value) == 2
    with pytest.raises(GrammarError, match="too large, or nested too deeply"):
        grammars.constraint(rules(3000), (STOP,))
    with pytest.raises(GrammarError, match="1,048,5"):
        checked_grammar('start: "A"' + " " * (1 << 20))
    assert json_grammar(definitions(100)) and grammars.constraint(checked_grammar(rules(300)), (STOP,)).forced()


def test_errors_are_one_line_and_leave_the_engine_usable(monkeypatch):
    """Bad grammars and schemas, a missing tokenizer or stop id, and a grammar that is too much while decoding are
    one-line errors, and the next request is right."""
    import llguidance

    engine = words_engine()
    before = engine.generate(PROMPTS[0], request(WORDS[0])).run()[0].token_ids
    for grammar in ("start: [", '{"broken": ', 'other: "a"'):
        with pytest.raises(ValueError, match="the grammar has an error") as error:
            engine.generate(PROMPTS[0], request(grammar))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Engine(MODEL).generate(PROMPTS[0], request(WORDS[0]))
    unending = Engine(MODEL, PieceTokenizer(LETTERS.pieces))
    with pytest.raises(ValueError, match="names none; pass stop_ids"):
        unending.generate(PROMPTS[0], request(WORDS[0]))
    for schema in ("[", "3", {"type": "nonsense"}, {"type": "string", "minLength": -1}):
        with pytest.raises(ValueError, match="the JSON schema") as error:
            json_grammar(schema)
        assert "\n" not in str(error.value)
    small = partial(llguidance.LLMatcher, limits=llguidance.LLParserLimits(max_items_in_row=20))
    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "LLMatcher", small)
        with pytest.raises(GrammarError, match="cannot be followed further: Parser Error") as error:
            engine.generate(PROMPTS[0], request("start:" + " x" * 5 + '\nx: "A"* "A"* "A"*')).run()
    assert "\n" not in str(error.value) and exit_code(error.value) == 2
    assert engine.generate(PROMPTS[0], request(WORDS[0])).run()[0].token_ids == before


# ------------------------------------------------------------------ JSON schemas on the demo model

TEXT = {"type": "string", "maxLength": 6}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}


def thing(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS = {
    "object": thing(name=TEXT, age=SMALL),
    "keys in unicode": thing(**{"größe": SMALL, "名": {"enum": ["日本", "🦅"]}}),
    "many keys": thing(**{f"a_rather_long_key_{i}": {"type": "boolean"} for i in range(6)}),
}


@pytest.fixture(scope="module")
def demo_engines():
    return [
        load(DEMO, ctx=512, device="cpu"),
        load(DEMO, eagle=DEMO / "eagle3", ctx=512, device="cpu", eagle_always=True),
    ]


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_follow_their_schema_with_and_without_a_head(name, demo_engines):
    """The text follows the schema, the ids are the same with a head, and its drafts are accepted."""
    jsonschema = pytest.importorskip("jsonschema")
    plain, drafting = demo_engines
    prompt = plain.tokenizer.encode("def main():\n    return ")
    for temperature in (0.0, 1.0):
        params = request(json_grammar(SCHEMAS[name]), temperature, seed=len(name), max_new_tokens=250)
        ours, theirs = (engine.generate(prompt, params).run()[0] for engine in (drafting, plain))
        assert ours.token_ids == theirs.token_ids and ours.stop_reason == "eos"
        jsonschema.validate(json.loads(ours.text), SCHEMAS[name])
        assert theirs.tau in (0, 1) and (ours.tau > 1 or ours.new_tokens < 8)


def test_command_with_a_schema(tmp_path, capsys):
    """--json-schema shapes the text, and --gauge times every phase of such steps; a broken file is one line, and with
    --grammar it is refused."""
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMAS["object"]))
    flags = ["--json-schema", str(file), "--json", "-p", "x = ", "--max-new-tokens", "90", "--gauge"]
    flags += ["--eagle", str(DEMO / "eagle3"), "--tree", "chain:3"]
    assert main(flags) == 0
    output = json.loads(capsys.readouterr().out)
    assert set(json.loads(output["text"])) == {"name", "age"}
    assert all(output["gauge_ms"][phase] > 0 for phase in ("draft", "verify", "accept", "step"))
    file.write_text("[")
    assert main(flags) != 0 and capsys.readouterr().err.count("\n") == 1
    assert main([*flags, "--grammar", WORDS[0]]) == 2 and "--grammar" in capsys.readouterr().err
