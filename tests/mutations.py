"""What fuzzers do to files and texts: changes of the kinds that break parsers."""

from __future__ import annotations

import json
import random
import struct
from typing import Any, TypeVar

Whole = TypeVar("Whole", bytes, str)
_BYTES = (b"\0", b"\xff", b"\x7f", b"\x80", b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" * 11, b"0777")
_TOKENS = (
    *("nan", "inf", "-inf", "1e999", "-1", "0", "1.5", "9" * 25, "9" * 5000, "true", "null", '""', "''", "[]", "{}"),
    *'[]{}"\\\0\n\r=:,.-\ud800\udcff\u202e٣² ',
    *("[[", "]]", "[" * 3000, "1-99999999", "0:0-65536", "65536:0", "$(id)", "../..", "\x1b[2J"),
)
_VALUES = (
    *("true", "-1", "0", "1", "3", "0.5", "1e400", "nan", "-inf", "9223372036854775807", "9" * 30, "1979-05-27"),
    *('""', '"x"', '"0:0"', '"0:0-40"', '"1,1"', '"2:1"', '"dp"', '"pipedream"', '"gpipe"', "[]", "{}", '["0:0"]'),
)
_JSON = (
    *(None, True, -1, 0, 1, 1.5, 10**25, float("nan"), float("inf"), "", "x", "0:0", [], {}, [[]], [None], {"a": 1}),
    *(10**400, -(2**63), 1e308, "\ud800", "\x1b[2J\n", "x" * 5000, json.loads("[" * 200 + "]" * 200)),
)


def mutated(whole: Whole, generator: random.Random) -> Whole:
    """A few changes: bits and values flipped, ranges removed, doubled or moved, special values, a cut end."""
    for _ in range(generator.choice((1, 1, 2, 4, 8))):
        whole = _changed(whole, generator)
    return whole


def _changed(whole: Whole, generator: random.Random) -> Whole:
    at = generator.randrange(len(whole) + 1)
    end = at + generator.randrange(1, 40)
    way = generator.randrange(8)
    if way in (6, 7) and isinstance(whole, str) and " = " in whole:
        return _with_value(whole, generator)
    one, special = _specials(whole, at, generator)
    match way:
        case 0:
            return whole[:at] + one + whole[at + 1 :]
        case 1 | 6:
            return whole[:at] + whole[end:]
        case 2:
            return whole[:end] + whole[at:]
        case 3:
            return whole[:at] + special + whole[at:]
        case 4 | 7:
            return whole[:at] + special + whole[at + len(special) if isinstance(whole, bytes) else end :]
        case _:
            return whole[:at]


def _specials(whole: Whole, at: int, generator: random.Random) -> tuple[Whole, Whole]:
    """One other letter or byte, and something that parsers find special."""
    if isinstance(whole, str):
        return chr(generator.randrange(1, 256)), generator.choice(_TOKENS)
    before = whole[at] if at < len(whole) else 0
    flipped = generator.choice((before ^ 1 << generator.randrange(8), generator.randrange(256)))
    return bytes([flipped]), generator.choice(_BYTES)


def _with_value(text: str, generator: random.Random) -> str:
    """A text of `name = value` with another value."""
    lines = text.split("\n")
    number = generator.choice([number for number, line in enumerate(lines) if " = " in line])
    lines[number] = f"{lines[number].partition(' = ')[0]} = {generator.choice(_VALUES)}"
    return "\n".join(lines)


def with_value_changed(tree: Any, generator: random.Random) -> Any:
    """What JSON holds, with one value of it replaced or removed."""
    if isinstance(tree, dict) and tree and generator.random() < 0.9:
        key = generator.choice(list(tree))
        if generator.random() < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        return {**tree, key: with_value_changed(tree[key], generator)}
    if isinstance(tree, list) and tree and generator.random() < 0.9:
        index = generator.randrange(len(tree))
        return [*tree[:index], with_value_changed(tree[index], generator), *tree[index + 1 :]]
    return generator.choice(_JSON)


def changed_json(text: str, generator: random.Random) -> str:
    """JSON, or one of its lines if they are JSON each, with one value changed."""
    lines = [text] if text.startswith("{\n") or text.count("\n") < 2 else text.splitlines()
    at = generator.randrange(len(lines))
    lines[at] = json.dumps(with_value_changed(json.loads(lines[at]), generator))
    return "\n".join(lines)


def with_header_length(data: bytes) -> bytes:
    """A safetensors file whose first number is the length of its header, so that the reader gets past it."""
    end = data.find(b"}}", 8)
    return struct.pack("<Q", end + 2 - 8) + data[8:] if end > 0 else data
