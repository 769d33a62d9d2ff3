"""The token of a Ray cluster of our own. Ray reads it when it is imported, so this module must not import Ray."""

from __future__ import annotations

import os
import secrets


def use_own_token() -> None:
    """Ray's core listens on every interface: who connects must know this cluster's token. One for this process and its
    children, so that none is left in the home folder. The user's own choice stands."""
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
