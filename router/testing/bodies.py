"""JSON bodies that are small on the wire and large in memory, to test that they are refused."""

from __future__ import annotations

HEAD = b'{"model":"tiny","prompt":'
CHAT_HEAD = b'{"model":"tiny","messages":'
MANY = 1 << 20
_ONE_CHAT = b'[{"role":"user","content":"x"}]'


def items(one: bytes, count: int, last: bytes = b"null") -> bytes:
    return b"[" + (one + b",") * count + last + b"]"


def keys(count: int) -> bytes:
    return b",".join(b'"a%d":1' % number for number in range(count))


def multiplying_bodies() -> list[tuple[str, bytes]]:
    """Pairs of (path below /v1/, body). Each must be refused with 400."""
    messages = items(b'{"role":"user","content":"x"}', 130_000, b'{"role":"user","content":"x"}')
    return [
        ("completions", HEAD + items(b'"a"', MANY - 100) + b"}"),
        ("completions", HEAD + items(b"1", 2 * MANY - 100, b"1") + b"}"),
        ("completions", HEAD + items(b"1", MANY // 2 - 100, b"1") + b"}"),
        ("completions", HEAD + items(b"[]", MANY) + b"}"),
        ("completions", HEAD + items(b"[]", 30_000) + b"}"),
        ("completions", HEAD + items(b'"a"', 60_000) + b"}"),
        ("completions", HEAD + b'"x",' + keys(300_000) + b"}"),
        ("completions", HEAD + b'"x",' + keys(30_000) + b"}"),
        ("completions", HEAD + b'"x","logit_bias":{' + keys(300_000) + b"}}"),
        ("completions", HEAD + b'"x","stop":' + items(b"1", MANY) + b"}"),
        ("completions", HEAD + b'"' + b"a,[{" * (MANY - 100) + b'"}'),
        ("chat/completions", CHAT_HEAD + items(b"{}", MANY) + b"}"),
        ("chat/completions", CHAT_HEAD + messages + b"}"),
        ("chat/completions", CHAT_HEAD + b'[{"role":"user","content":"x",' + keys(300_000) + b"}]}"),
        ("chat/completions", CHAT_HEAD + b'[{"role":"user","content":' + items(b"{}", MANY) + b"}]}"),
        ("chat/completions", CHAT_HEAD + _ONE_CHAT + b',"tools":' + items(b"[[[]]]", MANY // 2) + b"}"),
        ("chat/completions", CHAT_HEAD + _ONE_CHAT + b',"tools":' + items(b"1.5", MANY // 2 - 100) + b"}"),
        ("responses", b'{"model":"tiny","input":[{"role":"user","content":' + items(b"{}", MANY) + b"}]}"),
        ("responses", b'{"model":"tiny","input":[{' + keys(300_000) + b"}]}"),
    ]
