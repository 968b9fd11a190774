"""A headless browser for tests: ``chromium``, or the program that LOGITLESS_BROWSER names."""

from __future__ import annotations

import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

BROWSER = os.environ.get("LOGITLESS_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
"""It draws nothing, asks nobody and calls nowhere."""


def program() -> str:
    """The browser. Skips the test where there is none; one that is named and missing is an error later."""
    if not BROWSER:
        pytest.skip("no browser: install Debian's chromium, or name one in LOGITLESS_BROWSER")
    return BROWSER


def dom_of(address: str, folder: Path, width: int = 1440) -> str:
    """The document at an address as text, after its scripts ran; what they wait for is not waited for."""
    options = [*QUIET, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    done = subprocess.run([program(), *options, "--dump-dom", address], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr[-2000:]
    return done.stdout


class Site:
    """A folder that is served on this machine, and a browser that is asked about it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.page, self.answers = folder, "", queue.Queue()

    def ask(self, body: str, profile: Path, seconds: float = 240.0) -> Any:
        """What a script on a page beside the others returns, through JSON: the body of an asynchronous function.

        It has `frame`, a window as wide as a phone, and `open(page)`, which loads a page of the site there.
        """
        self.page = PAGE.replace("BODY", body)
        site = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path != "/ask.html":
                    return super().do_GET()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write(site.page.encode())

            def do_POST(self) -> None:
                site.answers.put(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(204)
                self.end_headers()

        serve = functools.partial(Handler, directory=self.folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}/ask.html"
            options = [*QUIET, f"--user-data-dir={profile / 'profile'}", address]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            browser = subprocess.Popen([program(), *options], start_new_session=True, **quiet)
            try:
                said = json.loads(self.answers.get(timeout=seconds))
            finally:
                os.killpg(browser.pid, signal.SIGKILL)
                browser.wait()
                server.shutdown()
        assert "error" not in said, said["error"]
        return said["answer"]


PAGE = """<!doctype html><meta charset="utf-8"><iframe width="390" height="844"></iframe><script>
const frame = document.querySelector("iframe")
const open = (page) => new Promise((done) => { frame.onload = done; frame.src = page })
const answer = async () => { BODY }
const send = (said) => fetch("/", { method: "POST", body: JSON.stringify(said) })
answer().then((answer) => send({ answer }), (error) => send({ error: `${error}` }))
</script>"""
