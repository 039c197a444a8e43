"""Addresses at which the other ranks can reach this process."""

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

Address = tuple[str, int]

# Destinations outside of this host, to find the interface of the default route. The addresses are for documentation
# (RFC 5737, RFC 3849) and get no data: connecting a datagram socket only looks up the route.
_OUTSIDE: tuple[tuple[int, str], ...] = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # Linux: address of an interface


def own_hosts() -> list[str]:
    """Addresses of this host, the likeliest first.

    Order: the interface set for gloo or NCCL, the route to the job's master, the default route, loopback.
    """
    found = dict.fromkeys(host for host in _candidates() if not host.startswith("127.") and host != "::1")
    return [*found, "127.0.0.1"]


def reachable(addresses: list[Address], *, same_machine: bool) -> list[Address]:
    """The addresses worth trying: loopback only on the same machine, and there first."""
    if same_machine:
        return sorted(addresses, key=lambda address: not address[0].startswith("127."))
    return [address for address in addresses if not address[0].startswith("127.")]


def _candidates() -> Iterator[str]:
    for variable in _INTERFACE_VARIABLES:
        if name := os.environ.get(variable, "").split(",")[0]:
            with suppress(OSError):
                yield _interface_address(name)
    if master := os.environ.get("MASTER_ADDR"):
        with suppress(OSError):
            for kind, _, _, _, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
                with suppress(OSError):
                    yield _source_towards(kind, str(address[0]))
    for family, host in _OUTSIDE:
        with suppress(OSError):
            yield _source_towards(family, host)


def _interface_address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def _source_towards(family: int, host: str) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
