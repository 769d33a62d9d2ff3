"""The HTTP edge against valid and invalid requests that schemathesis generates from its OpenAPI document.

This file is also the client program: `test_fuzz_http.py http://127.0.0.1:8000`. Generating requests uses so much of a
core that workers in the same process would seem to hang."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from router.request_terms import PRIORITY, TENANT, TIMEOUT
from router.testing.site import MODEL, RouterSite
from tandem.config.router import RouterSpec

EXAMPLES = 400 if os.environ.get("TANDEM_SOAK") else 6  # of each operation that has a body, for each mode
MIB = 1 << 20
GROWTH_BYTES = 50 * MIB
RULES = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def as_events(document: dict[str, Any]) -> dict[str, Any]:
    """Wraps the schemas of streams: the document describes the data of an event, as is usual. Schemathesis expects
    the schema of the event around it."""
    for path in document["paths"].values():
        for operation in path.values():
            content = operation["responses"].get("200", {}).get("content", {})
            if (stream := content.get("text/event-stream")) is not None:
                held = {"anyOf": [stream["schema"], {"$ref": "#/components/schemas/Error"}]}
                data = {"type": "string", "contentMediaType": "application/json", "contentSchema": held}
                either = {"anyOf": [{"const": "[DONE]"}, data]}
                stream["schema"] = {"type": "object", "required": ["data"], "properties": {"data": either}}
    return document


def fuzz_operation(
    operation: Any, mode: GenerationMode, base_url: str, session: requests.Session, seen: Counter[int]
) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES if operation.body else min(EXAMPLES, 50),
        deadline=None,  # this process does not read tests/conftest.py
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    def one(case: schemathesis.Case[Any]) -> None:
        if isinstance(case.body, dict) and len(str(case.body.get("model", ""))) < 8:
            case.body["model"] = MODEL  # else nearly every case ends at an unknown model
        if mode is GenerationMode.POSITIVE:
            for name in (PRIORITY, TENANT, TIMEOUT):  # or at an unknown class
                case.headers.pop(name, None)
        answer = case.call(base_url=base_url, session=session, timeout=30)
        seen[answer.status_code] += 1
        case.validate_response(answer, checks=RULES)

    one()


def fuzz(base_url: str) -> Counter[int]:
    """Counts answers by status. Raises on the first answer that breaks a rule, with the smallest request for it."""
    seen = Counter[int]()
    session = requests.Session()
    document = schemathesis.openapi.from_dict(as_events(session.get(f"{base_url}/openapi.json").json()))
    for found in document.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]
        fuzz_operation(operation, GenerationMode.POSITIVE, base_url, session, seen)
        if operation.body or operation.query:
            fuzz_operation(operation, GenerationMode.NEGATIVE, base_url, session, seen)
    return seen


@pytest.fixture
async def site(tmp_path: Path, model_dir: Path) -> AsyncIterator[RouterSite]:
    site = RouterSite(tmp_path, model_dir, RouterSpec(http_port=0, grpc_port=0, max_body_bytes=65536))
    await site.start()
    yield site
    await site.stop()


@pytest.mark.soak
@pytest.mark.acceptance(34, here="10 requests for each operation with a body", soak="400")
async def test_requests_that_fit_or_break_the_document_get_documented_answers(site: RouterSite) -> None:
    before = site.process.memory_info().rss
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, site.base_url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await client.communicate()
    assert client.returncode == 0, errors.decode()[-8000:]
    seen = {int(status): count for status, count in json.loads(out).items()}
    grown = site.process.memory_info().rss - before
    print(f"{sum(seen.values())} requests, by status {seen}; {grown / MIB:.1f} MiB more")
    assert seen[200] > EXAMPLES
    assert seen[400] > EXAMPLES
    assert grown < GROWTH_BYTES
    assert "Traceback" not in site.log(), site.log()[-4000:]


if __name__ == "__main__":
    print(json.dumps(dict(sorted(fuzz(sys.argv[1]).items()))))
