"""This host's own address, as its peers see it."""

from __future__ import annotations

import ipaddress
import socket

from tandem.errors import ConfigError

AUTO_HOST = "auto"


def address_towards(peer: str) -> str:
    """The local IP address that a connection to `peer` (host:port) would come from. Sends nothing.

    Raises ConfigError when there is no way to it.
    """
    host, _, port = peer.rpartition(":")
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: only a look at the routing table
            return str(ipaddress.ip_address(probe.getsockname()[0]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transfer.bind_host: auto needs a route to {peer}, and there is none ({error}): name an address instead",
            field="transfer.bind_host",
        ) from None
