"""The remote sandbox follows the protocol of SandboxFusion: requests, replies and retries."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from verl.errors import RewardError
from verl.rewards.sandbox import sandbox_fusion
from verl.rewards.sandbox.sandbox import Limits, run
from verl.rewards.scorers.code import compute_score

pytestmark = [pytest.mark.contract, pytest.mark.timeout(60)]


class Service:
    """Answers from a list, (HTTP status, body), and remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.runs = False
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.asked.append((self.path, body))
                status, answer = service.answer(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, asked: dict[str, Any]) -> tuple[int, Any]:
        if not self.runs:
            return self.answers.pop(0)
        files = {name: base64.b64decode(content) for name, content in asked["files"].items()}
        outcome = run(asked["code"], stdin=asked["stdin"], files=files)
        return finished(outcome.stdout, outcome.exit_code)


def finished(stdout: str = "", code: int | None = 0, status: str = "Finished") -> tuple[int, Any]:
    result = {"status": status, "execution_time": 0.25, "return_code": code, "stdout": stdout, "stderr": "e"}
    overall = "Success" if code == 0 else "Failed"
    return 200, {"status": overall, "message": "", "compile_result": None, "run_result": result, "files": {}}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(sandbox_fusion.time, "sleep", lambda _: None)
    service = Service()
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield service
    service.server.shutdown()
    service.server.server_close()
    thread.join()


def test_a_program_is_sent_with_its_limits(service: Service) -> None:
    service.answers = [finished("42\n")]
    limits = Limits(seconds=3, memory_bytes=256 << 20)
    outcome = sandbox_fusion.run("print(42)", url=service.url, stdin="in", files={"a.txt": "text"}, limits=limits)
    assert (outcome.status, outcome.exit_code, outcome.stdout, outcome.seconds) == ("ok", 0, "42\n", 0.25)
    ((path, asked),) = service.asked
    assert path == "/run_code"
    assert asked == {
        "code": "print(42)",
        "language": "python",
        "stdin": "in",
        "compile_timeout": 10.0,
        "run_timeout": 3,
        "memory_limit_MB": 256,
        "files": {"a.txt": base64.b64encode(b"text").decode()},
    }


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (finished(code=1), "error", 1),
        (finished(code=-9), "killed", -9),
        (finished(code=None, status="TimeLimitExceeded"), "timeout", None),
    ],
)
def test_the_end_of_a_program_is_reported_as_by_the_local_sandbox(
    service: Service, answer: tuple[int, Any], status: str, code: int | None
) -> None:
    service.answers = [answer]
    outcome = sandbox_fusion.run("x", url=f"{service.url}/run_code")
    assert (outcome.status, outcome.exit_code) == (status, code)


def test_requests_to_a_busy_service_are_retried(service: Service) -> None:
    service.answers = [(503, {}), (429, {}), finished("late\n")]
    assert sandbox_fusion.run("x", url=f"{service.url}/").stdout == "late\n"
    assert [path for path, _ in service.asked] == ["/run_code"] * 3


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(200, {"status": "SandboxError", "message": "no disk", "run_result": None})], "could not run.*no disk"),
        ([finished(status="Error")], "could not run"),
        ([(422, {"detail": "bad"})], "HTTP 422.*bad"),
        ([(503, {})] * 3, "HTTP 503"),
        ([(200, [])] * 3, "not a JSON object"),
    ],
)
def test_an_error_of_the_service_is_not_a_result(service: Service, answers: list[tuple[int, Any]], words: str) -> None:
    service.answers = list(answers)
    with pytest.raises(RewardError, match=words):
        sandbox_fusion.run("x", url=service.url)
    assert service.answers == []


def test_an_unreachable_service_is_an_error_with_its_url(service: Service) -> None:
    service.server.server_close()
    with pytest.raises(RewardError, match=r"check reward.sandbox.url"):
        sandbox_fusion.run("x", url="http://127.0.0.1:9")


def test_programs_and_functions_are_scored_remotely(service: Service) -> None:
    service.runs = True
    function = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    program = {"inputs": ["1"], "outputs": ["2"]}
    assert compute_score("c", "def add(a, b): return a + b", function, sandbox_url=service.url)["score"] == 1.0
    assert compute_score("c", "print(int(input()) + 1)", program, sandbox_url=service.url)["score"] == 1.0
    with pytest.raises(RewardError, match="two connected sandboxes"):
        compute_score("c", "x", ["assert x"], sandbox_url=service.url)
