"""The interface of an address of this host; by which NCCL meets, where there are several hosts."""

import json
import shutil
import subprocess
import sys

import pytest
from slipstream.kernels.comm.nccl import settings_of
from slipstream_runtime.interfaces import interface_of
from slipstream_runtime.span import Host, Peers, exported

NO_HOST = "203.0.113.9"  # of documentation alone


def test_addresses_of_this_host_have_interfaces():
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == "lo"
    assert interface_of(NO_HOST) is None
    assert interface_of("2001:db8::9") is None
    if shutil.which("ip") is None:
        return
    listed = subprocess.run(["ip", "-j", "address"], capture_output=True, check=True).stdout
    for each in json.loads(listed):
        for found in each["addr_info"]:
            assert interface_of(found["local"]) == each["ifname"]


def of_hosts(address: str) -> dict[str, str]:
    hosts = [Host("a", "127.0.0.1", 1, 0, 1), Host("b", address, 1, 1, 1)]
    return exported(Peers("", 1, hosts))


def test_nccl_meets_where_other_hosts_reach_this_one():
    """On the loopback alone they would never meet."""
    name = "NCCL_SOCKET_IFNAME"
    assert settings_of({})[name] == "lo"
    assert settings_of(of_hosts("127.0.0.2"))[name] == "=lo"
    assert name not in settings_of(of_hosts(NO_HOST))  # NCCL's own choice
    assert name not in settings_of({name: "ib"} | of_hosts("127.0.0.2"))


@pytest.mark.skipif(shutil.which("ip") is None, reason="no ip")
def test_the_interface_is_that_of_the_address_among_several():
    """In a network of its own, with two interfaces in one range of addresses."""
    script = """
ip link set lo up
ip link add wire1 type veth peer name wire2 || exit 7
for at in 1 2; do
  ip link set wire$at up
  ip address add 10.9.0.$at/24 dev wire$at && ip address add fd09::$at/64 dev wire$at nodad
done
exec "$0" -c 'from slipstream_runtime.interfaces import interface_of as of
print(*map(of, ("10.9.0.1", "10.9.0.2", "fd09::2", "10.8.0.1")))'
"""
    command = ["unshare", "-rn", "sh", "-c", script, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 7 or "unshare" in done.stderr:
        pytest.skip(f"no such interface here: {done.stderr.strip()}")
    assert done.stdout.split() == ["wire1", "wire2", "wire2", "None"], done.stderr
