"""JSON schemas as client libraries and people write them, made into schemas that llguidance can follow.

An object that lists its properties is closed unless its schema says otherwise: a model could invent keys for ever. What
cannot be enforced is left out, and named.
"""

from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import unquote

MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords that hold schemas by name
PLACES = ("items", "prefixItems", "additionalProperties", "additionalItems")  # that hold a schema or a list of them
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Limits of numbers -> the farthest of each that llguidance takes.
LIMITS = {"minimum": -(2**62), "exclusiveMinimum": -(2**62), "maximum": 2**62, "exclusiveMaximum": 2**62}
NUMBER = ["integer", "number"]
# Keywords of which llguidance takes some values only -> the types that they belong to.
PARTLY = dict.fromkeys((*LIMITS, "multipleOf"), NUMBER) | {"pattern": "string", "patternProperties": "object"}
ABOUT = {"type", "title", "description"}  # what says nothing of a name, which is always a text
MOST_REFERENCES = 100  # one behind the other
MOST_STEPS = 100_000  # of reading a schema, since references can make it grow without end
Names = tuple[str, ...] | None  # of properties; None: any name


def doubtful(value: Any) -> Iterator[dict[str, Any]]:
    """For each keyword in a schema of which llguidance takes some values only, a schema that has just that one."""
    if isinstance(value, dict):
        yield from (_alone(key, value) for key in PARTLY if key in value)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from doubtful(part)


def _alone(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that has one keyword of another one, with the type that the keyword belongs to."""
    value, kind = schema[key], PARTLY[key]
    if key == "patternProperties" and isinstance(value, dict):
        value = dict.fromkeys(value, True)
    return {"type": schema["type"] if kind == NUMBER and schema.get("type") in NUMBER else kind, key: value}


def followable(schema: Any, refused: Collection[dict[str, Any]] = (), closed: bool = True) -> tuple[Any, set[str]]:
    """The schema for llguidance, and the keywords that it lacks because they cannot be enforced.

    refused: those of `doubtful` that llguidance does not take. closed: whether objects are closed. Raises RecursionError
    for a schema that is too large.
    """
    follower = _Follower(schema, refused, closed)
    return follower.follow(schema), follower.left_out


class _Follower:
    """Makes one schema followable."""

    def __init__(self, root: Any, refused: Collection[dict[str, Any]], closed: bool):
        self.root = root
        self.refused = refused
        self.closed = closed
        self.left_out: set[str] = set()
        self.steps = 0

    def follow(self, schema: Any, others: Names = (), inside: tuple[str, ...] = ()) -> Any:
        """The same schema, with closed objects.

        others: the properties that other schemas of the same object list. inside: the references that led here from it.
        """
        if not isinstance(schema, dict):
            return schema
        if schema.get("not") in ({}, True):
            return False
        made = self._enforceable(schema)
        for key in MAPS:
            if isinstance(made.get(key), dict):
                made[key] = {name: self.follow(part) for name, part in made[key].items()}
        for key in PLACES:
            if key in made:
                parts = made[key]
                made[key] = [self.follow(part) for part in parts] if isinstance(parts, list) else self.follow(parts)
        own, groups = _own_names(schema), list(self._groups(schema, inside))
        names = [self._names(parts, inside) for _, parts in groups]
        for i, (key, parts) in enumerate(groups):
            around = _union(others, own, *names[:i], *names[i + 1 :])
            if key == "$ref" and around:  # it is closed where it is defined, without the names around it
                referred = self.follow(parts[0], around, (*inside, made.pop("$ref")))
                made["allOf"] = [referred, *_listed(made.get("allOf"))]
            elif key == "allOf":
                made[key] = [self.follow(part, around, inside) if part is parts[0] else part for part in made[key]]
            elif key in ("anyOf", "oneOf"):
                made[key] = [self.follow(part, around, inside) for part in parts]
        # the properties of what it refers to come first
        base = [each for (key, _), each in zip(groups, names, strict=True) if key == "$ref"]
        self._close(made, _union(*base, own, others, *names))
        return made

    def _close(self, made: dict[str, Any], names: Names) -> None:
        """Close an object in place, if it lists properties and does not say otherwise. names: all that it may have."""
        least = made.get("minProperties", 0)
        if names is None or not self.closed or not isinstance(least, int) or least > len(names):
            return
        if made.get("unevaluatedProperties") is False:
            del made["unevaluatedProperties"]
            made.setdefault("properties", {})
        listed = made.get("properties")
        if isinstance(listed, dict) and "additionalProperties" not in made:
            made |= {"properties": {name: listed.get(name, {}) for name in names}, "additionalProperties": False}

    def _enforceable(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema in keywords that llguidance reads, or names as those that it does not know."""
        made = {key: value for key, value in schema.items() if (key, value) != ("uniqueItems", False)}
        for key in COUNTS:
            if isinstance(made.get(key), float) and made[key].is_integer():
                made[key] = int(made[key])
        for key in PARTLY.keys() & made.keys():
            if _alone(key, schema) not in self.refused:
                continue
            value = made.pop(key)
            if key in LIMITS and isinstance(value, int | float) and value * LIMITS[key] > 0:
                made[key] = LIMITS[key]  # which is nearer, so that it holds the other one, too
            else:
                self.left_out.add(key)
        if "properties" not in made and "patternProperties" not in made and "propertyNames" in made:
            self._name_properties(made)
        for key, rest in (("prefixItems", "items"), ("items", "additionalItems")):  # a list is closed as an object is
            if isinstance(made.get(key), list) and rest not in made:
                made |= {rest: False} | ({} if made.keys() & {"minItems", "maxItems"} else {"minItems": len(made[key])})
        return made

    def _name_properties(self, made: dict[str, Any]) -> None:
        """Say what the keyword propertyNames says in other keywords, where they can."""
        names, every = self._resolved(made["propertyNames"]), made.get("additionalProperties", True)
        if names is not True and not isinstance(names, dict):
            return
        said = {} if names is True else {key: value for key, value in names.items() if key not in ABOUT}
        listed, pattern = said.get("enum", [said.get("const")]), said.get("pattern")
        if len(said) == 1 and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
            made |= {"properties": dict.fromkeys(listed, every), "additionalProperties": False}
        elif len(said) == 1 and isinstance(pattern, str) and _alone("pattern", names) not in self.refused:
            made |= {"patternProperties": {pattern: every}, "additionalProperties": False}
        elif said:
            return
        del made["propertyNames"]

    def _resolved(self, schema: Any) -> Any:
        """What a schema that only refers to another one stands for."""
        for _ in range(MOST_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._referred(schema["$ref"])
        return schema

    def _groups(self, schema: dict[str, Any], inside: tuple[str, ...]) -> Iterator[tuple[str, list[Any]]]:
        """The schemas that also describe the object that this one describes: a keyword and its alternatives."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise RecursionError
        reference = schema.get("$ref")
        if reference not in inside and (part := self._referred(reference)) is not None:
            yield "$ref", [part]
        for key in ("allOf", "anyOf", "oneOf"):
            parts = _listed(schema.get(key))
            yield from ((key, [part]) for part in parts) if key == "allOf" else [(key, parts)] * bool(parts)
        for key in ("if", "then", "else"):  # these are not enforced, but a valid object may need their properties
            if key in schema:
                yield key, [schema[key]]

    def _referred(self, reference: Any) -> Any:
        """The schema that a reference within this schema leads to, None for any other reference."""
        start, *keys = unquote(reference).split("/") if isinstance(reference, str) else [""]
        found = self.root if start == "#" else None
        for key in keys:
            key = key.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def _names(self, schemas: list[Any], inside: tuple[str, ...]) -> Names:
        """The properties that any of these schemas lists."""
        found: Names = ()
        for schema in schemas:
            if isinstance(schema, dict):
                others = [schema.get(key, False) for key in ("additionalProperties", "unevaluatedProperties")]
                if others != [False, False] or schema.get("patternProperties"):
                    return None
                within = (*inside, schema["$ref"]) if isinstance(schema.get("$ref"), str) else inside
                more = [self._names(parts, within) for _, parts in self._groups(schema, inside)]
                found = _union(found, _own_names(schema), *more)
        return found


def _own_names(schema: dict[str, Any]) -> tuple[str, ...]:
    """The properties that a schema itself lists or requires."""
    listed = schema.get("properties")
    names = [*(listed if isinstance(listed, dict) else ()), *_listed(schema.get("required"))]
    return tuple(name for name in names if isinstance(name, str))


def _listed(value: Any) -> list[Any]:
    """A list, or nothing for what should have been one."""
    return value if isinstance(value, list) else []


def _union(*parts: Names) -> Names:
    """The names of all parts, each once, in order."""
    return None if None in parts else tuple(dict.fromkeys(name for part in parts for name in part))
