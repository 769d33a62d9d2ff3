"""What a user is told of a Redis that is not there."""

from __future__ import annotations

import pytest

from cluster.spec.redis_probe import check_redis
from tandem.errors import ConfigError


def test_nothing_there_is_one_line_that_names_field_and_remedy_but_no_password() -> None:
    with pytest.raises(ConfigError) as refused:
        check_redis("redis://:hunter2@127.0.0.1:1/0", timeout_s=1.0)
    message = refused.value.message
    assert refused.value.field == "redis.url"
    assert message.startswith("redis.url: ")
    assert "127.0.0.1:1" in message
    assert "hunter2" not in message
    assert "\n" not in message


def test_what_is_no_redis_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        check_redis("http://127.0.0.1")
