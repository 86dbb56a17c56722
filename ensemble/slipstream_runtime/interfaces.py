"""Find the network interface that has an address of this host."""

import contextlib
import fcntl
import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path

_ADDRESS, _NETMASK = 0x8915, 0x891B  # SIOCGIFADDR, SIOCGIFNETMASK
_REQUEST_BYTES = 40  # of struct ifreq
_INET6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address, or with its network; None: none has.

    Args:
        address: in numbers, of IPv4 or IPv6.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    networks = [each for each in _interfaces() if each[1].version == wanted.version]
    for name, found in networks:
        if found.ip == wanted:
            return name
    return next((name for name, found in networks if wanted in found.network), None)


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    """Yield (name, address with its network), one of IPv4 and all of IPv6 for each interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = name.encode().ljust(_REQUEST_BYTES, b"\0")
            with contextlib.suppress(OSError):  # it has none
                address, netmask = (
                    socket.inet_ntoa(fcntl.ioctl(asking, code, request)[20:24])
                    for code in (_ADDRESS, _NETMASK)
                )
                yield name, ipaddress.IPv4Interface(f"{address}/{netmask}")
    with contextlib.suppress(OSError):  # a host without IPv6
        for line in _INET6.read_text().splitlines():
            digits, _, prefix, _, _, name = line.split()
            number = int(digits, 16)
            yield name, ipaddress.IPv6Interface((number, int(prefix, 16)))
