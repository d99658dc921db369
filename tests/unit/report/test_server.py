"""`verl report --serve`: only who knows the address gets the page, and only through this machine's own name."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from verl.errors import VerlError
from verl.report.server import ReportServer

pytestmark = pytest.mark.unit


@pytest.fixture
def pages() -> list[bytes]:
    return [b"second", b"first"]


@pytest.fixture
def server(pages: list[bytes]) -> Iterator[ReportServer]:
    def build() -> bytes:
        if not pages:
            raise VerlError("the folder is gone: api_key=abcdef123456")
        return pages.pop()

    with ReportServer(build) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_load_builds_the_page_again(server: ReportServer) -> None:
    assert [httpx.get(server.url).text for _ in range(2)] == ["first", "second"]
    failed = httpx.get(server.url)
    assert failed.status_code == 500
    assert "abcdef123456" not in failed.text


def test_other_addresses_and_names_get_nothing(server: ReportServer, pages: list[bytes]) -> None:
    root = f"http://127.0.0.1:{server.server_port}"
    for url, host in ((f"{root}/", None), (f"{root}/x{server.path}", None), (server.url, "evil.example")):
        assert httpx.get(url, headers={"Host": host} if host else {}).status_code == 404
    assert httpx.post(server.url).status_code == 501
    assert len(pages) == 2
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.path) > 30
