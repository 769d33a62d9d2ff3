"""The engine's tokens are the reference's, however the work is cut."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from conftest import (  # noqa: E402  (a sibling module, without packages under tests/)
    Driver,
    MakeRank,
    assert_at_rest,
    expected_tokens,
    greedy,
    random_prompt,
    request,
)
