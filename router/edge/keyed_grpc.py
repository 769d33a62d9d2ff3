"""gRPC calls with an idempotency key: each client reads the messages of the answer from its log, which one detached run
writes. A chunk of the log is a message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from router.auth.grpc_gate import call_of, header_of
from router.edge.keyed_http import REPLAYED
from router.idempotency.answer_log import AnswerLog
from router.idempotency.identity import keyed_request
from router.idempotency.keyed_answers import HEADER, KeyedAnswers
from router.idempotency.keyed_metrics import Api
from router.service import RouterService
from tandem.errors import TandemError

Answer = TypeVar("Answer", bound=Message)
Run = Callable[[], AsyncGenerator[Answer, None]]


def has_key(context: Any) -> bool:
    return header_of(context)(HEADER) is not None


class KeyedCalls:
    def __init__(self, answers: KeyedAnswers, service: RouterService) -> None:
        self._answers = answers
        self._service = service

    def answer(
        self, method: str, kind: type[Answer], request: Message, context: Any, run: Run[Answer]
    ) -> AsyncGenerator[Answer, None]:
        """The messages of `run`; if the call has a key, of the first call with this key. Then `run` must not use the
        context, because it may outlast the call. Raises as `run`, and as `RouterService.take_keyed_request`,
        `keyed_request` and `KeyedAnswers.read`."""
        return self._answer(method, kind, request, context, run) if has_key(context) else run()

    async def _answer(
        self, method: str, kind: type[Answer], request: Message, context: Any, run: Run[Answer]
    ) -> AsyncGenerator[Answer, None]:
        service, call = self._service, call_of(context)
        service.take_keyed_request(call)
        asked = keyed_request(
            service.cluster,
            header_of(context),
            call,
            method,
            request.SerializeToString(deterministic=True),  # maps have no order of their own
            Api.GRPC,
        )

        async def produce(log: AnswerLog) -> None:
            async with aclosing(run()) as responses:
                async for response in responses:
                    log.append(response.SerializeToString())
                    await log.room()

        def on_end(raised: TandemError | None) -> None:
            """Ends the call of the first client with its run."""
            if call is not None:
                call.code = call.code if raised is None else raised.code
                service.calls.finish(call)

        reader = self._answers.read(asked, produce, on_end)
        try:
            if call is not None and not reader.is_repeat:
                call.is_detached = True
            chunks = [] if reader.is_repeat else await reader.next()
            if reader.is_repeat or reader.log.is_replayed:
                context.set_trailing_metadata(((REPLAYED, "true"),))
            while chunks or (chunks := await reader.next()):
                for chunk in chunks:
                    yield kind.FromString(chunk)
                chunks = []
        finally:
            reader.close()
