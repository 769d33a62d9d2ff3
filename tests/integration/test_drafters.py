"""Tools, schemas and plain chats through a prefill and a decode worker that drafts: clients read the same without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.testing.stub_worker import until
from tandem.config.engine import EngineSpec
from tandem.config.router import Disaggregation, RouterSpec
from tandem.testing.models import write_tiny_eagle, write_tiny_llama
from tests.integration.conftest import StartRouted
from tests.integration.test_tool_streams import EOS, KINDS, VOCAB, Read, read_all
from tests.unit.engine.test_drafts import write_exit, write_medusa

ALWAYS = RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS)
ENGINE: dict[str, Any] = {"kv_blocks": 1000, "max_step_tokens": 100}
NUMBERS = range(4 * len(KINDS))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab=VOCAB, seed=1, eos_token_id=EOS)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        "medusa": write_medusa(folder / "medusa", shared=False),
        "early_exit": write_exit(folder / "exit", layer=1),
        "eagle3": write_tiny_eagle(folder / "eagle3", tiny),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "decode_tp"),
    [
        ("lookup", 1), ("lookahead", 1), ("draft", 1), ("early_exit", 1), ("medusa", 1), ("eagle3", 1),
        ("trees", 1), ("draft", 2), ("eagle3", 2), ("trees", 2),
    ],
)  # fmt: skip
async def test_clients_read_the_same_whatever_drafts(
    routed: StartRouted, tiny: Path, heads: dict[str, Path], drafter: str, decode_tp: int
) -> None:
    drafts: dict[str, Any] = {"speculation": drafter, "speculation_adaptive": False}
    if drafter == "trees":
        drafter, drafts = "medusa", drafts | {"speculation": "medusa", "speculation_branches": 3}
    drafts |= {"speculation_model": str(heads[drafter])} if drafter in heads else {}
    drafts |= {"speculation_weights": "int8"} if drafter == "draft" else {}
    read: list[Sequence[Read]] = []
    for more in ({}, drafts):
        engine = EngineSpec.model_validate(ENGINE | more)
        async with routed(tiny, prefill=1, decode=1, decode_tp=decode_tp, engine=engine, router=ALWAYS) as live:
            read.append(await read_all(live, NUMBERS))
            if more:
                await until(lambda: "tandem_worker_proposed_tokens_total{" in live.app.metrics.render().decode())
    without, with_it = read
    for one, other in zip(without, with_it, strict=True):
        other.assert_valid()
        assert other.parts() == one.parts()
