"""The HTTP edge against what schemathesis makes of its own OpenAPI document: fitting requests and broken ones."""

from __future__ import annotations

import asyncio
import os
import re
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

from router.terms import PRIORITY, TENANT, TIMEOUT
from router.testing_site import MODEL, RouterSite
from tandem.config import RouterSpec

EXAMPLES = 400 if os.environ.get("TANDEM_SOAK") else 15  # of each operation that has a body, for each mode
MIB = 1 << 20
GROWTH_BYTES = 50 * MIB
RULES = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def fuzz_operation(operation: Any, mode: GenerationMode, session: requests.Session, seen: Counter[int]) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES if operation.body else min(EXAMPLES, 50),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    def one(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and len(str(case.body.get("model", ""))) < 8:
            case.body["model"] = MODEL  # else nearly everything ends at an unknown model
        if mode is GenerationMode.POSITIVE:
            for name in (PRIORITY, TENANT, TIMEOUT):  # or at a class that there is not
                case.headers.pop(name, None)
        answer = case.call(session=session, timeout=30)
        seen[answer.status_code] += 1
        case.validate_response(answer, checks=RULES)

    one()


def fuzz(base_url: str, seen: Counter[int]) -> None:
    """Raises on the first answer that breaks a rule, with the smallest request that gets it."""
    session = requests.Session()
    document = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    for found in document.get_all_operations():
        operation = found.ok()
        fuzz_operation(operation, GenerationMode.POSITIVE, session, seen)
        if operation.body or operation.query:
            fuzz_operation(operation, GenerationMode.NEGATIVE, session, seen)


@pytest.fixture
async def site(tmp_path: Path, model_dir: Path) -> AsyncIterator[RouterSite]:
    site = RouterSite(tmp_path, model_dir, RouterSpec(http_port=0, grpc_port=0, max_body_bytes=65536))
    await site.start()
    yield site
    await site.stop()


@pytest.mark.soak
async def test_whatever_fits_or_breaks_the_document_is_answered_as_it_says(site: RouterSite) -> None:
    seen = Counter[int]()
    before = site.process.memory_info().rss
    await asyncio.to_thread(fuzz, site.base_url, seen)
    grown = site.process.memory_info().rss - before
    print(f"{seen.total()} requests, by status {dict(sorted(seen.items()))}; {grown / MIB:.1f} MiB more")
    assert seen[200] > EXAMPLES
    assert seen[400] > EXAMPLES
    assert grown < GROWTH_BYTES
    assert not re.search("Traceback|error:", site.log()), site.log()[-4000:]
