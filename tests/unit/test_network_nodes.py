"""Sockets as /proc lists them; the nodes themselves are made by `make show-cluster`."""

from __future__ import annotations

import doctest
import socket

import network_nodes
import psutil
import pytest
from network_nodes import get_network, list_connections, list_listeners, select_network

pytestmark = pytest.mark.unit


def test_addresses_of_proc_are_decoded() -> None:
    assert doctest.testmod(network_nodes).attempted == 1
    assert doctest.testmod(network_nodes).failed == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "0.0.0.0"])
def test_a_listener_is_found_with_its_address(address: str) -> None:
    own = [psutil.Process()]
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        assert [each.address for each in list_listeners(own) if each.port == port] == [address]
    assert [each for each in list_listeners(own) if each.port == port] == []


def test_a_connection_is_found_with_both_ends() -> None:
    with socket.create_server(("127.0.1.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert (client.getsockname(), server.getsockname()) in list_connections([psutil.Process()])


def test_processes_are_selected_by_their_network() -> None:
    own = [psutil.Process()]
    assert select_network(own, get_network("self")) == own
    assert select_network(own, "net:[0]") == []
