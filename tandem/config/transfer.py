"""Settings of the KV plane: what moves KV between workers, and how it is checked."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from tandem.config.frozen import Frozen
from tandem.config.security import TlsSpec


class TransportKind(StrEnum):
    AUTO = "auto"
    MAPPED = "mapped"
    NCCL = "nccl"
    PROCESS_GROUP = "process_group"  # gloo
    TCP = "tcp"
    NIXL = "nixl"


class WireDtype(StrEnum):
    POOL = "pool"
    INT8 = "int8"


class TransferSpec(Frozen):
    transport: TransportKind = Field(
        TransportKind.AUTO,
        description="auto: the fastest that works between two workers: mapped (shared memory or CUDA IPC, within a "
        "host), nixl (RDMA, if installed), nccl (between GPUs), tcp. With TLS: mapped or tcp. process_group is gloo.",
    )
    tls: TlsSpec | None = Field(
        None, description="Mutual TLS 1.3 on every TCP connection of the KV plane; unset: security.tls."
    )
    digests: bool = Field(True, description="Send a digest with every KV piece, which the receiver checks.")
    wire_dtype: WireDtype = Field(
        WireDtype.POOL,
        description="int8: process_group and tcp links send KV as int8 with one scale per token and head; "
        "outputs may differ from those of a full-precision transfer.",
    )
    ticket_ttl_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        30.0, description="A KV lease without progress ends after this time."
    )
    bind_host: Annotated[str, Field(min_length=1)] = Field(
        "127.0.0.1",
        description="Address on which workers listen. auto: the address from which the worker's host reaches the "
        "controller, different on each host.",
    )

    @model_validator(mode="after")
    def _tls_covers_transport(self) -> TransferSpec:
        if self.tls is not None and not self.can_encrypt:
            raise ValueError(
                f"transfer.transport: {self.transport} cannot be encrypted; with transfer.tls, expected auto, mapped "
                "or tcp"
            )
        return self

    @property
    def can_encrypt(self) -> bool:
        return self.transport in (TransportKind.AUTO, TransportKind.MAPPED, TransportKind.TCP)
