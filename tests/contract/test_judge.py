"""The judge against a local HTTP server that replies, refuses, hangs and sends garbage."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from verl.errors import RewardError
from verl.rewards.judge import client
from verl.rewards.judge.judge import compute_score
from verl.rewards.pool.pool import RewardPool
from verl.rewards.settings import RewardFunctionSettings
from verl.types import Failed, Scored

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]

Reply = tuple[int, dict[str, str], bytes] | Callable[[BaseHTTPRequestHandler], None]
QUESTION = {"question": "What is 12 + 34?"}


def make_reply(text: Any) -> Reply:
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
    return 200, {}, body


class Service:
    """Answers with `replies` one after the other, the last of them for ever; keeps what it was asked, and when."""

    def __init__(self) -> None:
        self.replies: list[Reply] = [make_reply("score: 7/10")]
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.times: list[float] = []
        self.tunnels: list[str] = []
        self.over = threading.Event()
        service, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    service.times.append(time.time())
                    service.asked.append((self.path, dict(self.headers), body))
                    reply = service.replies.pop(0) if len(service.replies) > 1 else service.replies[0]
                if callable(reply):
                    return reply(self)
                status, headers, content = reply
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def do_CONNECT(self) -> None:
                service.tunnels.append(f"{self.requestline}\n{self.headers}")
                self.send_error(403)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def hang(self, handler: BaseHTTPRequestHandler) -> None:
        self.over.wait()
        handler.close_connection = True

    def drip(self, handler: BaseHTTPRequestHandler) -> None:
        """A byte now and then, so that no single wait is long."""
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not self.over.wait(0.01):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    def break_off(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"choices": [')
        handler.close_connection = True

    def talk_nonsense(self, handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"\x00\x01 this is not HTTP \r\n\r\n")
        handler.close_connection = True

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(client, "_FIRST_WAIT_S", 0.001)
    made = Service()
    yield made
    made.close()


async def ask(service: Service, answer: str = "46", **kwargs: Any) -> dict[str, float]:
    return await compute_score("sums", answer, "46", QUESTION, url=service.url, model="judge-7b", **kwargs)


async def test_the_request_has_question_answer_and_reference(service: Service, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
    result = await ask(service, answer="It is {ground_truth}", key_env="JUDGE_KEY", options={"max_tokens": 9})
    assert result == {"score": 0.7, "from_cache": 0.0}
    [(path, headers, body)] = service.asked
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer sk-secret"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-7b", 0.0, 9)
    text = body["messages"][0]["content"]
    assert "What is 12 + 34?" in text
    assert "It is {ground_truth}" in text, "what stands in an answer is not filled in"


async def test_messages_can_be_the_question(service: Service) -> None:
    raw = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12+34?"}]
    kwargs = {"url": f"{service.url}/chat/completions/", "model": "m", "question_key": "raw_prompt"}
    await compute_score("", "46", "46", {"raw_prompt": raw}, **kwargs)
    [(path, _, body)] = service.asked
    assert path == "/v1/chat/completions"
    assert "system: Be brief.\nuser: 12+34?" in body["messages"][0]["content"]


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {}, b"slow down"),
        (500, {}, b"oops"),
        (503, {}, b""),
        (200, {}, b"<html>a proxy's greeting</html>"),
        (200, {}, b'{"error": "overloaded"}'),
        (200, {}, b"[]"),
        make_reply(None),
        Service.break_off,
        Service.talk_nonsense,
        Service.hang,
        Service.drip,
    ],
)
async def test_transient_errors_are_retried(service: Service, trouble: Any) -> None:
    bad = trouble.__get__(service) if callable(trouble) else trouble
    service.replies = [bad, bad, make_reply("score: 7/10")]
    # Short only where somebody hangs, and then with room for a machine that stands still.
    patience = {"retries": 20, "timeout_s": 0.5} if callable(trouble) else {"retries": 2, "timeout_s": 60}
    assert (await ask(service, **patience))["score"] == 0.7
    assert len(service.asked) >= 3


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ((500, {}, b"oops"), "returned HTTP 500: oops"),
        ((429, {}, b"slow down"), "requests_per_minute"),
        ((200, {}, b"<html>"), "is not JSON: '<html>'"),
        ((200, {}, b"{}"), "without choices"),
        (Service.hang, "within timeout_s=0.2"),
        (Service.drip, "within timeout_s=0.2"),
    ],
)
async def test_a_lasting_error_is_a_failure_with_its_cause(service: Service, trouble: Any, says: str) -> None:
    service.replies = [trouble.__get__(service) if callable(trouble) else trouble]
    with pytest.raises(RewardError, match="The judge at http") as raised:
        await ask(service, retries=1, timeout_s=0.2 if callable(trouble) else 60)
    assert says in str(raised.value)
    assert "after 2 requests" in str(raised.value)


async def test_a_truncated_reply_is_a_failure_without_a_retry(service: Service) -> None:
    choice = {"message": {"content": "score: 10/10"}, "finish_reason": "length"}
    service.replies = [(200, {}, json.dumps({"choices": [choice]}).encode())]
    with pytest.raises(RewardError, match=r"was cut off after 12 characters; .*max_tokens"):
        await compute_score("", "46", "46", QUESTION, url=service.url, model="m")
    assert len(service.asked) == 1


async def test_a_refused_connection_is_a_failure_with_its_cause(service: Service) -> None:
    service.close()
    with pytest.raises(RewardError, match="cannot be reached: ConnectionRefusedError"):
        await ask(service, retries=1)


@pytest.mark.parametrize(
    ("status", "fix"),
    [(400, "model"), (401, "key_env"), (403, "key_env"), (404, "url"), (422, "model"), (307, "url"), (418, "url")],
)
async def test_an_invalid_request_is_not_retried(service: Service, status: int, fix: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    service.replies = [(status, {"Location": "http://127.0.0.1:9/elsewhere"}, b"the key sk-secret is no good")]
    with pytest.raises(RewardError, match=f"returned HTTP {status}") as raised:
        await ask(service, retries=5, key_env="JUDGE_KEY")
    assert len(service.asked) == 1
    assert fix in str(raised.value).split("\n")[0].rpartition(";")[2]
    assert "sk-secret" not in str(raised.value)


@pytest.mark.parametrize("body", [b"my key is sk-secret", b'{"error": "no access for sk-secret"}'])
async def test_a_reply_that_repeats_the_key_does_not_reveal_it(service: Service, body: bytes, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    service.replies = [(200, {}, body)]
    with pytest.raises(RewardError, match=r"\*\*\*") as raised:
        await ask(service, retries=0, key_env="JUDGE_KEY")
    assert "sk-secret" not in str(raised.value)


async def test_a_proxy_of_an_encrypted_request_does_not_see_the_key(service: Service, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    monkeypatch.setenv("https_proxy", service.url.removesuffix("/v1").replace("http://", "http://user:pass-word@"))
    kwargs = {"url": "https://judge.invalid/v1", "model": "m", "retries": 0, "key_env": "JUDGE_KEY"}
    with pytest.raises(RewardError, match=r"cannot be reached: .*403") as raised:
        await compute_score("", "46", "46", QUESTION, **kwargs)
    [tunnel] = service.tunnels
    assert "judge.invalid:443" in tunnel
    assert "sk-secret" not in f"{tunnel} {raised.value}"
    assert "pass-word" not in str(raised.value)


@pytest.mark.parametrize("has_key", [True, False])
async def test_a_plain_request_with_a_key_avoids_the_proxy(service: Service, has_key: bool, monkeypatch: Any) -> None:
    proxy = Service()
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
    result = await ask(service, key_env="JUDGE_KEY" if has_key else None)
    proxy.close()
    assert result["score"] == 0.7
    assert (len(service.asked), len(proxy.asked)) == ((1, 0) if has_key else (0, 1))


async def test_an_invalid_url_is_reported_at_once() -> None:
    with pytest.raises(RewardError, match=r"cannot be called: .*https://host/v1"):
        await compute_score("", "", "", QUESTION, url="judge.local/v1", model="m")


async def test_retry_after_delays_the_next_request(service: Service, tmp_path: Path) -> None:
    service.replies = [(429, {"Retry-After": "0.3"}, b""), make_reply("score: 1/10")]
    await ask(service, requests_per_minute=60_000, cache=str(tmp_path / "judge.sqlite"), timeout_s=60)
    assert service.times[1] - service.times[0] >= 0.29


async def test_an_unreadable_verdict_is_a_failure_and_is_not_cached(service: Service, tmp_path: Path) -> None:
    cache = str(tmp_path / "deep" / "judge.sqlite")
    service.replies = [make_reply("I like it."), make_reply("score: 10/10")]
    with pytest.raises(RewardError, match="without a last line such as"):
        await ask(service, cache=cache)
    assert len(service.asked) == 1
    assert (await ask(service, cache=cache))["score"] == 1.0


async def test_a_reply_with_a_lone_surrogate_is_read_and_cached(service: Service, tmp_path: Path) -> None:
    service.replies = [make_reply("\ud83d\nscore: 4/10")]
    cache = str(tmp_path / "judge.sqlite")
    assert [(await ask(service, cache=cache))["score"] for _ in range(2)] == [0.4, 0.4]
    assert len(service.asked) == 1


async def test_a_cached_reply_is_not_requested_again(service: Service, tmp_path: Path) -> None:
    cache = str(tmp_path / "judge.sqlite")
    first = await ask(service, cache=cache)
    again = await ask(service, cache=cache)
    assert (first, again) == ({"score": 0.7, "from_cache": 0.0}, {"score": 0.7, "from_cache": 1.0})
    assert len(service.asked) == 1
    await ask(service, cache=cache, answer="47")
    await ask(service, cache=cache, options={"temperature": 1.0})
    assert len(service.asked) == 3, "another answer, another way of asking"


async def test_scoring_processes_share_the_rate_limit_and_the_cache(service: Service, tmp_path: Path) -> None:
    cache = tmp_path / "judge.sqlite"
    kwargs = {"url": service.url, "model": "m", "cache": str(cache), "requests_per_minute": 300, "retries": 0}
    settings = RewardFunctionSettings("verl.rewards.judge", kwargs=kwargs, workers=2, timeout_s=60)
    with RewardPool(settings) as pool:
        await pool.start()
        for number in range(8):
            pool_outcome = await pool.score("sums", f"{number % 4}", "46", QUESTION)
            assert isinstance(pool_outcome, Scored)
        assert len(service.asked) == 4, "each answer once, whichever process has it"
        service.replies = [(500, {}, b"oops")]
        failed = await pool.score("sums", "another", "46", QUESTION)
    assert isinstance(failed, Failed)
    assert "returned HTTP 500" in failed.message
    assert service.times[-1] - service.times[0] >= 3 * 0.2 - 0.01  # the first request may be slow on its way
