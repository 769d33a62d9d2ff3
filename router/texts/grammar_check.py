"""Checks clients' grammars before their requests are queued: workers get none that they could not use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from router.admission.parse_threads import ParseThreads
from tandem.errors import CheckpointError, InputError
from tandem.grammar.compiler import GrammarCompiler
from tandem.grammar.constraint import Constraint

KEPT = 512  # results
_COST = 16  # of a character of a grammar, as characters of a prompt


class GrammarChecker:
    """Args: `load` gives the model's compiler, once, at the first grammar."""

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._load = load
        self._compiler: GrammarCompiler | None = None
        self._kept: OrderedDict[tuple[str, bytes], InputError | None] = OrderedDict()  # by tenant, grammar and fields

    async def check(self, constraint: Constraint, threads: ParseThreads, tenant: str) -> None:
        """Raises InputError with the field, and with the JSON pointer of an unsupported keyword."""
        said_of = "\0".join([constraint.grammar, constraint.field, *(part.field for part in constraint.parts)])
        key = (tenant, blake2b(said_of.encode(), digest_size=16).digest())
        if key not in self._kept:
            cost = _COST * len(constraint.grammar)
            self._kept[key] = await threads.run(tenant, cost, lambda: self._fault(constraint))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        if (fault := self._kept[key]) is not None:
            raise type(fault)(fault.message, field=fault.field)

    def _fault(self, constraint: Constraint) -> InputError | None:
        """In a thread."""
        try:
            if self._compiler is None:
                self._compiler = self._load()
            self._compiler.check(constraint)
        except CheckpointError as error:
            what = f"{constraint.field}: this model's answers cannot be constrained: {error.message}"
            return InputError(what, field=constraint.field)
        except InputError as error:
            return error
        return None
