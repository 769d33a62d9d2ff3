"""The base class of all configuration models, and the types of their numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=0, le=4096)]
PositiveCount = Annotated[int, Field(ge=1, le=4096)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
