"""Who calls, and what they may. Made from an API key or a JWT, never from what a request says about itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from tandem.config.auth import LimitsSpec

TENANT_PATTERN = r"[A-Za-z0-9_.:@-]{1,64}"
TENANT_SHAPE = re.compile(TENANT_PATTERN)
NO_LIMITS = LimitsSpec()


class Access(StrEnum):
    """What a route or method asks of who calls it."""

    PUBLIC = "public"  # anybody: probes
    CALLER = "caller"  # any valid key or token
    ADMIN = "admin"  # one with the admin flag: it sees everybody's figures
    CONTROLLER = "controller"  # the cluster's own controller, which shows a secret of its own


@dataclass(frozen=True, slots=True)
class Principal:
    """`key_id` names it in the audit log and is no secret. None: no bound."""

    key_id: str
    tenant: str
    models: frozenset[str] | None = None
    priorities: frozenset[str] | None = None
    limits: LimitsSpec = NO_LIMITS
    admin: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


ANYBODY = Principal(key_id="", tenant="", admin=True)  # where nobody is asked
