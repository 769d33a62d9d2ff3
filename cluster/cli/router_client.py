"""A small gRPC client of the router, for the commands."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc
import grpc.aio
from cryptography import x509

from cluster.certificates import load, names_of
from tandem.errors import ConfigError
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.rpc.tls import read_file
from tandem.v1 import inference_pb2, inference_pb2_grpc


def edge_channel(address: str, ca: str | None) -> grpc.aio.Channel:
    """A channel to a router. `ca`: PEM file with the CA of its certificate, or with that certificate itself; None: no
    TLS. Raises ConfigError."""
    if ca is None:
        return grpc.aio.insecure_channel(address)
    roots, options = read_file(ca, "--ca"), []
    first = load(ca, "--ca")[0]
    if not _is_authority(first) and (name := _server_name(first)):
        options.append(("grpc.ssl_target_name_override", name))  # the file is the server's certificate itself
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options=options)


def check_api_key(api_key: str | None) -> None:
    """Raises ConfigError for a key that no header can hold, such as one with a line's end."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("TANDEM_API_KEY: expected printable ASCII characters", field="--api-key")


def chat_request(
    messages: list[inference_pb2.ChatMessage], *, model: str, temperature: float | None, max_tokens: int | None
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=model,
        chat=inference_pb2.ChatMessages(messages=messages),
        sampling=inference_pb2.SamplingParams(temperature=temperature, max_tokens=max_tokens),
    )


async def generate(
    channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest, api_key: str | None = None
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    """Yields the stream's events. Raises the router's TandemError."""
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
    call = stub.Generate(request, metadata=metadata)
    try:
        async for event in call:
            yield event
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    finally:
        call.cancel()  # nothing, unless the caller takes no more events


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _server_name(certificate: x509.Certificate) -> str | None:
    names = (str(n.value) for n in names_of(certificate) if isinstance(n, x509.DNSName | x509.IPAddress))
    return next(names, None)
