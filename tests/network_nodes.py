"""Nodes on this machine that are machines of their own to the programs on them. Needs Linux, unshare and ip.

Each node has namespaces of the kernel: an address and a host name of its own, and its own processes, `/dev/shm` and
folder of temporary files. A bridge connects the nodes. All of this is inside namespaces, too: call `enclose` first.
Nothing of the machine's own network is changed, nothing inside can be reached from outside, and when the enclosing
process ends, however it ends, the kernel kills all processes and removes everything.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import psutil

__all__ = [
    "Listener",
    "Node",
    "enclose",
    "find_obstacle",
    "get_network",
    "list_connections",
    "list_listeners",
    "list_networks",
    "make_bridge",
    "select_network",
]

_ENCLOSING = ("--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
_BRIDGE, _NETWORK = "bridge0", "10.77.0"
_TRIAL = (
    f"ip link add {_BRIDGE} type bridge && ip link add name link1 type veth peer name link2 && "
    f"mount -t tmpfs none /dev/shm && unshare {' '.join(_ENCLOSING)} true"
)
_INIT = """
set -e
mount --bind "$1" /etc/hosts
mount -t tmpfs none /dev/shm
mount -t tmpfs none "$2"
hostname "$3"
echo ready
sleep infinity &
wait  # bash also waits for orphans, as the first process of a machine does
"""
_CONNECTED, _LISTEN = "01", "0A"  # states in /proc/net/tcp
_ENVIRONMENT = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
_WAIT_S = 60.0


def enclose(command: Sequence[str]) -> list[str]:
    """Return the command that runs another one in namespaces of its own, in which nodes can be made."""
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    return ["unshare", *user, *_ENCLOSING, "--", *command]


def find_obstacle() -> str | None:
    """Return why no nodes can be made here; None if they can."""
    try:
        done = subprocess.run(
            enclose(["sh", "-c", _TRIAL]), env=_ENVIRONMENT, capture_output=True, text=True, timeout=_WAIT_S
        )
    except FileNotFoundError:
        return "unshare (util-linux) is not installed"
    return None if done.returncode == 0 else f"namespaces cannot be made: {done.stderr.strip()[-200:]}"


def make_bridge() -> None:
    """Make the bridge that connects the nodes. It is also their route to other networks, of which there are none."""
    _call(f"ip link add {_BRIDGE} type bridge && ip link set {_BRIDGE} up && ip link set lo up")
    _call(f"ip address add {_NETWORK}.254/24 dev {_BRIDGE}")


class Node:
    """A node, until it is killed; after that it can start again, empty, as a machine does."""

    def __init__(self, number: int, folder: Path, temporary: Path) -> None:
        """Start the node.

        Args:
            number: The last byte of its address.
            folder: For its file of host names, which has the node's own as 127.0.1.1, as Debian's installer writes it.
            temporary: A folder that is another one on each node, and empty when the node starts.
        """
        self._number, self.name, self.address = number, f"node-{number}", f"{_NETWORK}.{number}"
        self._link, self._temporary, self._hosts = f"link{number}", temporary, folder / f"hosts-{number}"
        self._hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        temporary.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        command = ["unshare", *_ENCLOSING, "--", "bash", "-c", _INIT, "init"]
        self._process = subprocess.Popen(
            [*command, str(self._hosts), str(self._temporary), self.name], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{self.name} did not start")
        [init] = psutil.Process(self._process.pid).children()
        self._init = init.pid
        self._network = get_network(self._init)
        # The same card each time: others remember the address of the card.
        card = f"02:00:00:00:00:{self._number:02x}"
        _call(f"ip link add name {self._link} type veth peer name eth0 address {card} netns {self._init}")
        _call(f"ip link set {self._link} master {_BRIDGE} up")
        self.call(
            f"ip link set lo up && ip address add {self.address}/24 dev eth0 && ip link set eth0 up && "
            f"ip route add default via {_NETWORK}.254"
        )

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one on the node."""
        return ["nsenter", f"--target={self._init}", "--all", f"--wdns={Path.cwd()}", "--", *command]

    def call(self, script: str) -> str:
        """Run a script of the shell on the node; return what it prints."""
        command = self.enter(["sh", "-c", script])
        return subprocess.run(
            command, env=_ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True, timeout=_WAIT_S
        ).stdout

    def kill(self) -> None:
        """Kill the first process of the node, and with it all others: at once, as when a machine loses its power."""
        os.kill(self._init, signal.SIGKILL)
        self._process.wait(_WAIT_S)
        until = time.monotonic() + _WAIT_S
        while self.list_processes() and time.monotonic() < until:
            time.sleep(0.05)
        _call(f"ip link delete {self._link} 2>/dev/null || true")  # the kernel does so, too, but later

    def cut_off(self) -> None:
        """Unplug the node from the network; its processes continue."""
        _call(f"ip link set {self._link} down")

    def plug_in(self) -> None:
        _call(f"ip link set {self._link} up")

    def list_processes(self) -> list[psutil.Process]:
        return select_network(psutil.process_iter(), self._network)


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that waits for connections, and the command of the process that has it."""

    address: str
    port: int
    command: str


def list_listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """Return all listening sockets of processes, which may be on any node."""
    return [
        Listener(*_decode(socket.local), command)
        for command, socket in _list_sockets(processes)
        if socket.state == _LISTEN
    ]


def list_connections(processes: Iterable[psutil.Process]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Return address and port of the own and of the other end of all connections of processes on any node."""
    return [
        (_decode(socket.local), _decode(socket.remote))
        for _, socket in _list_sockets(processes)
        if socket.state == _CONNECTED
    ]


def get_network(pid: int | str) -> str:
    """Return the network namespace of a process ("self": of this one); empty if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def select_network(processes: Iterable[psutil.Process], network: str) -> list[psutil.Process]:
    """Return the processes in a network namespace."""
    return [process for process in processes if get_network(process.pid) == network]


def list_networks() -> list[str]:
    """Return the names of the network devices of this machine, or of the node on which this runs."""
    return sorted(psutil.net_if_addrs())


@dataclass(frozen=True, slots=True)
class _Socket:
    """A line of /proc/net/tcp."""

    local: str
    remote: str
    state: str
    inode: str


def _list_sockets(processes: Iterable[psutil.Process]) -> Iterator[tuple[str, _Socket]]:
    """Yield the TCP sockets of processes, with the command of each."""
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            held = set(_list_inodes(process.pid))
            command = " ".join(process.cmdline())
            for socket in _read_sockets(process.pid):
                if socket.inode in held:
                    yield command, socket


def _list_inodes(pid: int) -> Iterator[str]:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
                yield match[1]


def _read_sockets(pid: int) -> Iterator[_Socket]:
    """Yield all TCP sockets in the network of a process."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, _, _, _, _, _, inode, *_ = line.split()
            yield _Socket(local, remote, state, inode)


def _decode(end: str) -> tuple[str, int]:
    """Return address and port of one end in /proc/net/tcp or tcp6: words of four bytes in the machine's byte order.

    >>> _decode("0100007F:1F90"), _decode("00000000000000000000000000000000:0016")
    (('127.0.0.1', 8080), ('::', 22))
    """
    address, _, port = end.partition(":")
    words = [bytes.fromhex(address[i : i + 8]) for i in range(0, len(address), 8)]
    parsed = ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed), int(port, 16)


def _call(script: str) -> None:
    subprocess.run(["sh", "-c", script], env=_ENVIRONMENT, check=True, timeout=_WAIT_S)
