"""A grammar in a JSON string has the texts of the grammar itself, each in its one way to be written."""

from __future__ import annotations

import contextlib
import json
import time
from random import Random

import pytest

from tandem.errors import InputError
from tandem.grammar.constraint import TextGrammar
from tandem.testing.schema_suite import Grammars

PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
# Of each grammar: some of its texts, and some that it has not.
CASES: list[tuple[str, str, list[str], list[str]]] = [
    ("regex", "[0-9]{2,3}", ["12", "123"], ["1", "1a"]),
    ("regex", r'say "(a|b)\n"\\', ['say "a\n"\\'], ['say "a\n"', "say a"]),
    ("regex", r"[^a]+", ["b", '"', "\\", "\n", "\x00\x1f", "é€😀", "\x7f"], ["a", '"a']),
    ("regex", r".+", ["x", '"\\\t', "\x1f"], ["a\nb"]),
    ("regex", r"\s\S\d\w\W\D", ['\n"1a\\x', ' a1a\t"'], ["\n\n1a\\x", " a1aax"]),
    ("regex", r"[\x09-\x22]", ["\t", "\n", '"', " ", "!"], ["#", "\x08"]),
    ("regex", r'["\\]', ['"', "\\"], ["a"]),
    ("regex", r"[a\-\]\n\/]+", ["a-]\n/"], ["b"]),
    ("regex", r"\u{22}\x41\U0001F600", ['"A😀'], ['"A']),
    ("regex", r"a/b\/c[/]", ["a/b/c/"], ["abc"]),
    ("regex", r"[\w.\d\"-]+@\W\D", ['a_1.-"@- ', "9@\n\\"], ["é@- ", "a@a "]),
    ("regex", r"\p{Lu}\pN", ["É1"], ["é1", '"1']),
    ("regex", r"\t*?x", ["\t\tx", "x"], ["tx"]),
    ("lark", 'start: "a\\n" X\nX: /b+/ "\\""', ['a\nb"'], ["a\nb", "anb"]),
    ("lark", 'start: /a.b/s | "\\"n"i', ["a\nb", 'a"b', '"n', '"N'], ["\\n", "a\\nb"]),
    ("lark", 'start: /n"t/i', ['N"T'], ["n\\T"]),
    ("lark", 'start: "!".."$"+', ['!"#$'], ["%"]),
    ("lark", "%import common.WS\n%ignore WS\nstart: NUM+\n%import common.INT -> NUM", ["1\n2\t3", "12"], ["a"]),
    ("lark", "%import common.ESCAPED_STRING\nstart: ESCAPED_STRING", ['"a\\"b"'], ['"a', "a"]),
    ("lark", 'start: "(" start ")" | "\\\\" // nested\n# and a note', ["((\\))"], ["(\\"]),
    ("lark", "start: LINE ~ 2..3\nLINE: /[a-z ]*/ /\\n/", ["a\nb c\n"], ["a\n", "a\nb"]),
    ("lark", 'start: A\nA: /[a-z"]+/ & /.{2}/', ['a"', '""'], ["a", "a\n"]),
    # Terminals that end where the escape of the next one begins.
    ("lark", 'start: /.+/ "\\n"', ["a\n", '"\\\n'], ["a", "\n"]),
    ("lark", 'start: line+\nline: /[^\\n]*/ "\\n"', ["\n", "a\n\nb\n"], ["a"]),
    ("lark", 'start: NAME "=" "\\"" /[^"]*/ "\\"" ";"?\nNAME: /[a-z]+/', ['ab="c\n";', 'a=""'], ['a="', "a"]),
    ("lark", 'start: (/a|(b|)+?x{1,2}/i | "Q\\t"i)+ "\\\\" "x".."z"', ["bXxq\t\\y", "A\\z"], ["\\x", "a\\a"]),
    ("lark", "%import common.SH_COMMENT\nstart: SH_COMMENT", ['# say "hi"\\'], ['say "hi"', "#\n"]),
    (
        "lark",
        "%import common.NEWLINE -> NL\n%import common.CPP_COMMENT\nstart: (CPP_COMMENT NL)+",
        ["//a\n// b\r\n"],
        ["//a"],
    ),
    (
        "lark",
        PATCH,
        ['*** Begin Patch\n*** Add File: a b.txt\n+x "y"\n+\n*** End Patch\n'],
        ["*** Begin Patch\n*** End Patch"],
    ),
    ("lark", "?start: [pair] tail{1,2}\npair: /a/ -> first\ntail: /\\r/", ["a\r", "\r\r"], ["a"]),
]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(tmp_path_factory.mktemp("model"))


def inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize(("syntax", "definition", "texts", "others"), CASES, ids=lambda each: str(each)[:40])
def test_the_texts_are_the_same(
    grammars: Grammars, syntax: str, definition: str, texts: list[str], others: list[str]
) -> None:
    grammar = TextGrammar.parse(syntax, definition, "definition")
    plain, escaped = grammars.of(grammar.plain), grammars.of(grammar.escaped)
    for text in texts:
        assert grammars.accepts(plain, text), text
        assert grammars.accepts(escaped, inner(text)), text
    for text in others:
        assert not grammars.accepts(plain, text), text
        assert not grammars.accepts(escaped, inner(text)), text
    for seed in range(20):
        if (written := grammars.answer(escaped, Random(seed))) is not None:
            text = json.loads(f'"{written}"')
            assert inner(text) == written, "a text has one way to be written"
            assert grammars.accepts(plain, text)
        if (text := grammars.answer(plain, Random(seed)) or "") and "\ufffd" not in text:
            assert grammars.accepts(escaped, inner(text))


@pytest.mark.parametrize(
    "definition", ["start: /[" + "a" * 60_000 + "]/", "a:" * 30_000, 'start: "x"\n' + ": " * 30_000, "/[" * 30_000]
)
def test_a_definition_is_read_in_time_that_grows_with_its_length(definition: str) -> None:
    began_s = time.process_time()
    with contextlib.suppress(InputError):
        TextGrammar.parse("lark", definition, "definition")
    assert time.process_time() - began_s < 5.0, "quadratic: half a minute and more"


def test_a_text_has_no_second_way(grammars: Grammars) -> None:
    escaped = grammars.of(TextGrammar.parse("regex", r"[A\n/]", "definition").escaped)
    assert [grammars.accepts(escaped, each) for each in ("A", "\\n", "/")] == [True] * 3
    for other in ("\\u0041", "\\u000a", "\n", "\\/", "n", '"'):
        assert not grammars.accepts(escaped, other), other


@pytest.mark.parametrize(
    ("syntax", "definition", "reason"),
    [
        ("regex", "^a", "'^a' cannot"),
        ("regex", "a$", "cannot"),
        ("regex", "(?=a)b", "cannot"),
        ("regex", "(?i)a", "cannot"),
        ("regex", r"a\b", "this escape"),
        ("regex", r"\p{Cc}", "letters"),
        ("regex", r"[[:alpha:]]", "in a set"),
        ("regex", r"[a&&b]", "in a set"),
        ("regex", r"\u{110000}", "Unicode"),
        ("lark", "start: /a/x", "flags"),
        ("lark", 'start: "\\x41"', "escapes of JSON"),
        ("lark", 'start: "ab".."c"', "single characters"),
        ("lark", "start: <tool>", "'<tool>' cannot"),
        ("lark", "start: @answer", "cannot"),
        ("lark", "start: %json {}", "cannot"),
        ("lark", 'start[stop="x"]: /a/', "cannot"),
        ("lark", "start: A\nA: ~B\nB: /a/", "cannot"),
        ("lark", "%import common (WS, INT)\nstart: WS", "cannot"),
        ("lark", "%import common.PYTHON_COMMENT\nstart: PYTHON_COMMENT", "common.PYTHON_COMMENT cannot"),
        ("lark", '%import common.WS\n%ignore WS\nstart: "\\"" /[a-z]/', "beside %ignore"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_by_name(syntax: str, definition: str, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        TextGrammar.parse(syntax, definition, "tools.0")
    assert refused.value.field == "tools.0"
    assert refused.value.message.startswith("tools.0: ")
    assert reason in refused.value.message
