"""Look at the pages of a site in headless Chromium, on a screen as narrow as a phone's, without any network."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PHONE = 390  # pixels
TIMEOUT_S = 300.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what a page loads from elsewhere does not exist
)
PROGRAM = r"""<!DOCTYPE html><meta charset="utf-8"><body><script>
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const isWide = (element) => element.scrollWidth > element.clientWidth + 1;
async function look(page) {
  const frame = document.createElement("iframe");
  frame.width = WIDTH; frame.height = 800;
  document.body.append(frame);
  await new Promise((resolve) => { frame.onload = resolve; frame.src = page; });
  const body = frame.contentDocument.body;
  const article = body.querySelector("article");
  const count = (selector) => article ? article.querySelectorAll(selector).length : 0;
  const diagrams = count("div.diagram");
  const drawn = () => [...(article ? article.querySelectorAll(".diagram > div.mermaid") : [])].filter(
    (diagram) => diagram.offsetHeight > 50).length;
  for (let wait = 0; drawn() < diagrams && wait < 100; wait++) await sleep(50);
  const seen = {
    page, diagrams, drawn: drawn(), formulas: count("math"), tables: count("table"),
    tex: /\\[a-z]*frac\b/.test(article ? article.innerText : ""),
    wide: isWide(frame.contentDocument.documentElement),
    wide_tables: [...(article ? article.querySelectorAll(".md-typeset__scrollwrap") : [])].filter(isWide).length,
  };
  frame.remove();
  return seen;
}
(async () => {
  const results = [];
  for (const page of PAGES) results.push(await look(page));
  await fetch("/", { method: "POST", body: JSON.stringify(results) });
})();
</script>"""


@dataclass(frozen=True, slots=True)
class View:
    """What a page looks like."""

    page: str
    diagrams: int
    drawn: int
    formulas: int
    tables: int
    tex: bool
    wide: bool
    wide_tables: int


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def look_at(site: Path, pages: list[str], chromium: str) -> list[View]:
    """Return the views of these pages (paths below `site`); fails if Chromium does not end in time."""
    program = PROGRAM.replace("PAGES", json.dumps([f"/{page}" for page in pages])).replace("WIDTH", str(PHONE))
    views, _ = run_program(site, program, chromium)
    return [View(**view) for view in views]


def run_program(site: Path, program: str, chromium: str) -> tuple[Any, list[str]]:
    """Open a page in Chromium that posts JSON to `/`; returns that, and the paths that were requested.

    Args:
        site: Folder whose files the program can open, by paths from the root.
        program: HTML of the page.
        chromium: Path of the browser.
    """
    done = threading.Event()
    results: list[Any] = []
    requested: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            if self.path != "/look.html":
                return super().do_GET()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(program.encode())
            return None

        def do_POST(self) -> None:
            results.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            done.set()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        address = f"http://127.0.0.1:{server.server_port}/look.html"
        browser = subprocess.Popen(
            [chromium, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if not done.wait(TIMEOUT_S):
                raise TimeoutError(f"Chromium has not finished within {TIMEOUT_S:.0f} s; it requested {requested}")
        finally:
            browser.terminate()
            browser.wait(30)
            server.shutdown()
    return results[0], requested
