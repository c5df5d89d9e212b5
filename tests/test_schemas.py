"""JSON schemas as client libraries write them: every text that their grammar allows validates, and ends."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import pathlib
import random
import re
import uuid
from typing import Annotated, Any, Literal

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="grammars need llguidance")
jsonschema = pytest.importorskip("jsonschema", reason="texts are checked by jsonschema (requirements-dev.txt)")
pydantic = pytest.importorskip("pydantic", reason="schemas are written by pydantic (requirements-dev.txt)")

from engine.grammar import Grammars  # noqa: E402
from engine.grammar_text import GrammarError, json_grammar  # noqa: E402

STOP = 256
PIECES = {i: bytes([i]) for i in range(256)} | {STOP: b"", 257: b"123", 258: b"0000000", 259: b"x12", 260: b"9,"}


class Bytes:
    """A tokenizer whose tokens are bytes, and some runs of digits."""

    pieces = PIECES
    special_ids = (STOP,)

    def encode(self, text, continuation=True):
        return list(text.encode())


MAKER = Grammars(Bytes(), len(PIECES))


def allowed(constraint) -> list[int]:
    return np.flatnonzero(np.unpackbits(constraint.allowed().numpy().view(np.uint8), bitorder="little")).tolist()


def walk(grammar: str, rng: random.Random, digits: bool = False) -> str | None:
    """A random text of a grammar; None where it does not end. digits: whether it takes all digits that it may."""
    constraint, text = MAKER.constraint(grammar, (STOP,)), b""
    while len(text) < 2000:
        tokens = allowed(constraint)
        if STOP in tokens and (len(tokens) == 1 or (not digits and (rng.random() < 0.5 or len(text) > 40))):
            return text.decode(errors="replace")
        numbers = [token for token in tokens if PIECES[token][:1].isdigit()] if digits else []
        ends = [token for token in tokens if PIECES[token] in (b"}", b"]", b'"')] if len(text) > 150 else []
        readable = [token for token in tokens if 32 <= token < 127 or token > STOP]
        token = rng.choice(numbers or (ends if rng.random() < 0.9 else []) or readable or tokens)
        constraint.take([token])
        text += PIECES[token]
    return None


def takes(schema: Any, text: str) -> bool:
    """Whether a text is a whole one of a schema's grammar."""
    constraint = MAKER.constraint(json_grammar(schema), (STOP,))
    for token in text.encode():
        if token not in allowed(constraint):
            return False
        constraint.take([token])
    return STOP in allowed(constraint)


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


S, N, O = {"type": "string"}, {"type": "number"}, {"type": "object"}
FORMATS = """password binary path file-path directory-path json-string base64url color regex uri-reference byte
    phone""".split()
A, B = thing(a=S), {"type": "object", "properties": {"b": {"type": "boolean"}}}
KIND = {"oneOf": [thing(kind={"const": "cat"}, lives=N), thing(kind={"const": "dog"}, name=S)]}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
TREE = thing(name=S, parts={"type": "array", "items": {"$ref": "#"}})
NODE = thing(value=N, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
SAFE = 2**53 - 1
# schema -> the keywords of it that are not enforced
SCHEMAS: list[tuple[Any, str]] = [
    *(({"type": "string", "format": name}, "") for name in FORMATS),  # an unknown format is an annotation
    (True, ""), ({}, ""), (O, ""),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": S, "uniqueItems": False}, ""),
    ({"type": "integer", "not": {"const": 1}}, "not"),
    ({**A, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({**A, "if": {"required": ["a"]}, "then": {"properties": {"c": S}, "required": ["c"]}}, "if then"),
    ({"type": "string", "pattern": "^(?=.*[0-9]).+$"}, "pattern"),
    ({"type": "string", "format": "email", "pattern": EMAIL}, "pattern"),
    ({"type": "object", "patternProperties": {"^(?!x)": S}}, "patternProperties"),
    ({"type": "number", "multipleOf": 0.123456789123}, "multipleOf"),
    ({"oneOf": [A, B]}, "oneOf"), (KIND, ""),
    ({"type": "object", "propertyNames": {"format": "uuid"}, "additionalProperties": N}, "propertyNames"),
    # in zod's words: a record, with keys of any kind, of an enumeration, and of a pattern; a tuple; sizes; other numbers
    ({"type": "object", "propertyNames": S, "additionalProperties": N}, ""),
    ({"type": "object", "propertyNames": {"enum": ["id", "n"]}, "additionalProperties": S, "required": ["id"]}, ""),
    ({"type": "object", "propertyNames": {**S, "pattern": "^[a-z]+$"}, "additionalProperties": N}, ""),
    ({"type": "array", "prefixItems": [S, N]}, ""), ({"type": "array", "prefixItems": [S], "items": N}, ""),
    ({"type": "array", "items": S, "minItems": 1.0, "maxItems": 3.0}, ""),
    ({"type": "integer", "minimum": -SAFE, "maximum": SAFE}, ""),
    ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, ""),
    ({"type": "number", "minimum": 1e300}, "minimum"), (thing(x={"type": "number", "multipleOf": 0.5}), ""),
    ({"type": "string", "pattern": r"^(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|1?\d?\d)$"}, ""),
    ({"anyOf": [thing(status={"const": "ok"}, data=S), thing(status={"const": "no"}, error=S)]}, ""), (TREE, ""),
    ({"allOf": [A, {**B, "required": ["b"]}], "unevaluatedProperties": False}, ""), ({**A, "not": {"const": 1}}, "not"),
    ({"type": "object", "properties": {"a": S, "never": {"not": {}}}}, ""), ({**A, "minProperties": 3}, ""),
    # in the words of OpenAI's guide: a chain of thought, a recursive page, a list, and limits
    (thing(steps={"type": "array", "items": thing(explanation=S, output=S)}, final_answer=S), ""),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE | {"additionalProperties": False}}}, ""),
    (thing(unit={"type": ["string", "null"], "enum": ["F", None]}, user={**S, "pattern": "^@[a-z_]+$"}), ""),
]  # fmt: skip


class Colour(enum.Enum):
    red = "r"
    two = 2


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    owner: Cat | None = None
    friends: list[Dog] = []


class Everything(pydantic.BaseModel):
    id: Annotated[int, pydantic.Field(gt=0)]
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    when: datetime.datetime
    at: tuple[float, float]
    more: dict[str, int | str] = {}


TYPES = [
    bool, bytes, list, dict, set[int], tuple[int, str], tuple[int, ...], Any, dict[Literal["a", "b"], int], int | None,
    Colour, dict[Colour, int], datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, pathlib.Path,
    re.Pattern, pydantic.SecretStr, pydantic.SecretBytes, pydantic.Json, pydantic.AnyUrl, pydantic.Base64Bytes,
    pydantic.PositiveInt, pydantic.ByteSize, pydantic.AwareDatetime, Annotated[float, pydantic.Field(gt=0, lt=1)],
    Annotated[int, pydantic.Field(multiple_of=7, ge=0)], Annotated[str, pydantic.Field(pattern="^[a-z]+$", max_length=4)],
    Annotated[list[int], pydantic.Field(min_length=1, max_length=3)], Dog, Everything, pydantic.create_model("Empty"),
]  # fmt: skip


def check(schema: Any, unenforced: str) -> None:
    """Walk through the grammar of a schema."""
    grammar = json_grammar(schema)
    assert sorted(grammar.unenforced) == sorted(unenforced.split())
    if unenforced:
        with pytest.raises(GrammarError, match=f"has {grammar.unenforced[0]}.*, which cannot be enforced"):
            json_grammar(schema, strict=True)
    for seed in range(6):
        text = walk(grammar, random.Random(seed))
        assert text is not None
        value = json.loads(text)
        if not unenforced:
            jsonschema.Draft202012Validator(schema).validate(value)


@pytest.mark.parametrize("schema, unenforced", SCHEMAS, ids=lambda value: json.dumps(value)[:60])
def test_texts_of_a_schema_validate(schema, unenforced):
    """A schema that is refused although most of it could be served, a keyword that is dropped silently, a text that does
    not validate or does not end."""
    check(schema, unenforced)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_texts_of_a_type_of_pydantic_validate(kind):
    """The same with the schemas that pydantic writes."""
    schema = pydantic.TypeAdapter(kind).json_schema()
    known = {
        "uniqueItems" if "uniqueItems" in json.dumps(schema) else "",
        "propertyNames" if kind == dict[Colour, int] else "",
    }
    check(schema, " ".join(sorted(known - {""})))


def test_what_lists_its_parts_is_closed():
    """A key that nobody asked for, in an object, in two that are one, behind a reference, or where a condition needs it;
    an object that stays closed although its schema opens it; a tuple with further items."""
    assert takes(A, '{"a":"x"}') and not takes(A, '{"a":"x","b":1}') and not takes({"properties": {}, **O}, '{"a":1}')
    assert takes({**A, "additionalProperties": True}, '{"a":"x","b":1}') and takes(O, '{"b":1}')
    both = {"allOf": [A, {**B, "required": ["b"]}]}
    assert takes(both, '{"a":"x","b":true}') and not takes(both, '{"a":"x","b":true,"c":1}')
    derived = {"$ref": "#/$defs/A", "properties": {"b": S}, "required": ["b"], "$defs": {"A": A}}
    assert takes(derived, '{"a":"x","b":"y"}') and not takes(derived, '{"a":"x","b":"y","c":1}')
    alone = thing(one={"$ref": "#/$defs/A"}, two=derived | {"$defs": {}}) | {"$defs": {"A": A}}
    assert takes(alone, '{"one":{"a":"x"},"two":{"a":"x","b":"y"}}')
    assert not takes(alone, '{"one":{"a":"x","b":"y"},"two":{"a":"x","b":"y"}}')
    either = {"properties": {"k": S}, "anyOf": [A, B], **O}
    assert takes(either, '{"k":"","a":"x"}') and not takes(either, '{"k":"","a":"x","b":true}')
    assert takes({**A, "required": ["a", "z"]}, '{"a":"x","z":[]}')
    assert takes({**A, "if": {}, "then": {"properties": {"c": S}}}, '{"a":"x","c":1}')
    assert takes({**A, "patternProperties": {"^x-": N}}, '{"a":"x","x-1":2}')
    pair = {"type": "array", "prefixItems": [N, S]}
    assert takes(pair, '[1,"x"]') and not takes(pair, "[1]") and not takes(pair, '[1,"x",2]')
    assert takes({"items": [N, S], "additionalItems": N, "type": "array"}, '[1,"x",2]')


def test_numbers_end():
    """Digits until the length limit, before or behind the point, also where several digits are one token; a text of
    digits, a pattern or a bound that needs more of them and is cut."""
    whole = {"type": "integer"}
    pair = {"type": "array", "prefixItems": [whole, S]}
    for schema, begun in ((whole, b"1"), (N, b"-1."), (True, b"1"), (thing(a=N), b'{"a":1'), (pair, b"[1")):
        for seed in range(4):
            constraint, text, rng = MAKER.constraint(json_grammar(schema), (STOP,)), begun, random.Random(seed)
            constraint.take(list(begun))
            while numbers := [token for token in allowed(constraint) if PIECES[token].isdigit()]:
                token = rng.choice(numbers)
                constraint.take([token])
                text += PIECES[token]
                assert len(text) < 40
            assert len(re.search(rb"\d+$", text)[0]) == 16
    assert len(walk(json_grammar(N), random.Random(0), digits=True)) < 60
    assert takes(whole | {"minimum": 10**17}, "1" * 18) and takes({"enum": [10**20]}, str(10**20))
    assert takes({"type": "string", "pattern": "^[0-9]{30}$"}, f'"{"7" * 30}"') and takes(S, f'"{"7" * 30}"')
    constraint = MAKER.constraint('start: "x" /[0-9]+/', (STOP,))  # a grammar says itself where a number ends
    constraint.take(b"x" + b"1" * 20)
    assert ord("1") in allowed(constraint)


def test_what_follows_digits_in_a_tree_is_that_of_plain_decoding():
    """A count of digits that a drafted branch leaves behind."""
    import torch

    plain, tree = (MAKER.constraint(json_grammar(N), (STOP,)) for _ in range(2))
    for constraint in (plain, tree):
        constraint.take(b"1" * 14)
    out = torch.zeros(4, tree.words, dtype=torch.int32)
    tree.over_tree([0, ord("2"), ord("3"), ord(".")], [0, 0, 1, 0], [True] * 4, out)
    for node, path in enumerate((b"", b"2", b"23", b".")):
        branch = MAKER.constraint(json_grammar(N), (STOP,))
        branch.take(b"1" * 14 + path)
        assert torch.equal(out[node], branch.allowed()), node
    assert torch.equal(plain.allowed(), tree.allowed())


def test_schemas_that_grow_without_end_are_refused():
    """Twenty definitions, each of which is two of the next one: a million copies, and a server that stands still."""
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(20)}
    with pytest.raises(GrammarError, match="nested too deeply"):
        json_grammar({**A, "allOf": [{"$ref": "#/$defs/d0"}], "$defs": doubled | {"d20": B}})
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"x": S}}
    with pytest.raises(GrammarError):
        json_grammar(loop | {"propertyNames": {"$ref": "#/$defs/a"}})
