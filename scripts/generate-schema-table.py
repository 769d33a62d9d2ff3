"""Writes the table of supported schemas in docs/structured-output.md from the JSON Schema test suite.

generate-schema-table.py [--check]     --check: writes nothing; exits 1 if the table is stale
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from marked_part import write_part

from tandem.errors import InputError, UnsupportedField
from tandem.testing.schema_suite import Case, Grammars, cases, written

PAGE = Path(__file__).resolve().parent.parent / "docs" / "structured-output.md"
BEGIN, END = "<!-- schemas: written by scripts/generate-schema-table.py -->\n", "<!-- schemas end -->\n"
HEAD = """\
| file of the suite | schemas | taken | valid answers that can be written | refused for |
|---|---|---|---|---|
"""


def table() -> str:
    with tempfile.TemporaryDirectory() as folder:
        grammars = Grammars(Path(folder))
        return HEAD + "".join(_row(grammars, *each) for each in groupby(cases(), lambda case: case.file))


def _row(grammars: Grammars, file: str, group: Iterator[Case]) -> str:
    schemas, taken, valid, writable = 0, 0, 0, 0
    refused = Counter[str]()
    for case in group:
        schemas += 1
        try:
            grammar = grammars.compile(case.schema)
        except UnsupportedField as error:
            refused[f"`{error.message.split(': ')[1].rpartition('/')[2]}`"] += 1
        except InputError:
            refused["nothing satisfies it"] += 1
        else:
            taken += 1
            answers = [written(instance) for instance, is_valid in case.tests if is_valid]
            valid += len(answers)
            writable += sum(grammars.accepts(grammar, each) for each in answers)
    why = ", ".join(f"{each} ({count})" for each, count in refused.most_common())
    return f"| `{file}` | {schemas} | {taken} | {f'{writable} of {valid}' if taken else ''} | {why} |\n"


if __name__ == "__main__":
    sys.exit(write_part(PAGE, BEGIN, END, table(), check="--check" in sys.argv[1:]))
