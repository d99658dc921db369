"""Ranks on two machines whose /etc/hosts gives each host name a loopback address, as Debian does.

Machines are network namespaces with a cable between them, which needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ADDRESSES = ("10.117.0.1", "10.117.0.2")
MACHINES = tuple(f"verl{os.getpid()}{letter}" for letter in "ab")
PORT = 20_017
RANK = """
import socket, sys, psutil, torch, torch.distributed as dist
from verl.training.process_group import init_process_group
rank, ranks, own, first = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
init_process_group(rank, ranks, first, int(sys.argv[5]), timeout_seconds=60, own_address=own or None)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print("sum", total.item(), sorted({c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}))
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, ...]]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    created = []
    try:
        for name in MACHINES:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("this machine has no network namespaces")
            created.append(name)
        run("ip", "link", "add", "cable0", "netns", MACHINES[0], "type", "veth", "peer", "cable0", "netns", MACHINES[1])
        for name, address in zip(MACHINES, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            run("ip", "-n", name, "link", "set", "cable0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield MACHINES
    finally:
        for name in created:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def start_ranks(machines: Sequence[str], hosts: Path, addresses: Sequence[str]) -> list[str]:
    """Run a rank on each machine, with its address or none; return what they print."""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("SOCKET_IFNAME")} | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank, (machine, address) in enumerate(zip(machines, addresses, strict=True)):
        script = f'mount --bind {hosts} /etc/hosts && exec "$@"'
        command = ["ip", "netns", "exec", machine, "unshare", "--mount", "sh", "-c", script, "sh", sys.executable]
        arguments = [str(rank), str(len(machines)), address, ADDRESSES[0], str(PORT)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        processes.append(subprocess.Popen([*command, "-c", RANK, *arguments], **options))
    try:
        return [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    name = os.uname().nodename
    path = tmp_path / "hosts"
    path.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    return path


def test_gloo_listens_where_other_machines_reach_it(machines: tuple[str, ...], hosts: Path) -> None:
    for output, address in zip(start_ranks(machines, hosts, ADDRESSES), ADDRESSES, strict=True):
        assert f"sum 3.0 ['{address}']" in output


def test_by_the_host_name_alone_it_listens_where_nobody_does(machines: tuple[str, ...], hosts: Path) -> None:
    """The reason for `own_address`; with two machines, the ranks would wait for each other."""
    (output,) = start_ranks(machines[:1], hosts, [""])
    assert "sum 1.0 ['10.117.0.1', '127.0.1.1']" in output
