"""Public datasets through the real client, against a stand-in for the hub on this machine."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest

from run.sealed import verify
from tests.conftest import LONG, ROOT, TINY

COMMIT = hashlib.sha1(b"the only commit").hexdigest()
REPO = "someone/stories"


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


@pytest.fixture
def hub():
    """Serves one dataset of two splits; yields its address and the paths that were asked for."""
    stories = [f"Story {i}: Tom had {i % 7} apples and gave {i % 3} to Sue." for i in range(300)]
    files = {
        "data/train-00000.parquet": parquet(stories),
        "data/validation-00000.parquet": parquet(stories[:20]),
    }
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body: bool):
            path = self.path.partition("?")[0].removeprefix(f"/api/datasets/{REPO}")
            asked.append(self.path)
            if f"/{REPO}/resolve/" in path:
                name = path.partition("/resolve/")[2].partition("/")[2]
                return self.send(files.get(name), body, name)
            if path.startswith("/tree/"):
                top = [{"type": "directory", "path": "data", "oid": "0" * 40, "size": 0}]
                return self.send(
                    json.dumps([*map(entry, files)] if path.endswith("/data") else top).encode(),
                    body,
                )
            if path == "" or path.startswith("/revision/"):
                about = {
                    "id": REPO,
                    "sha": COMMIT,
                    "siblings": [{"rfilename": name} for name in files],
                }
                return self.send(
                    json.dumps(about | {"private": False, "tags": [], "downloads": 0}).encode(),
                    body,
                )
            self.send(None, body)

        def send(self, content: bytes | None, body: bool = True, name: str | None = None):
            status, start = (404, 0) if content is None else (200, 0)
            content = content or b"{}"
            size = len(content)
            if (wanted := self.headers.get("Range")) and status == 200:
                start, _, end = wanted.removeprefix("bytes=").partition("-")
                content, status = content[int(start) : int(end) + 1 if end else None], 206
            self.send_response(status)
            if status == 206:
                self.send_header(
                    "Content-Range", f"bytes {start}-{int(start) + len(content) - 1}/{size}"
                )
            if status == 404:
                self.send_header(
                    "X-Error-Code", "RepoNotFound" if name is None else "EntryNotFound"
                )
            if name is not None:
                self.send_header("ETag", f'"{hashlib.sha256(files.get(name, b"")).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content)))
            self.send_header(
                "Content-Type", "application/json" if name is None else "application/octet-stream"
            )
            self.end_headers()
            if body:
                self.wfile.write(content)

    def entry(name: str) -> dict:
        return {
            "type": "file",
            "path": name,
            "size": len(files[name]),
            "oid": hashlib.sha1(files[name]).hexdigest(),
        }

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def train(folder, endpoint: str, *words: str) -> subprocess.CompletedProcess:
    environment = {
        key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")
    } | {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    short = ("steps=3", "data.vocab_size=400", "data=tinystories", f"data.repo={REPO}", *words)
    command = [sys.executable, str(ROOT / "train.py"), *TINY, *short]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONG
    )


@pytest.mark.parametrize("tokens", ["null", "4000"])
def test_a_public_dataset_is_downloaded_or_streamed(tmp_path, hub, tokens):
    endpoint, asked = hub
    done = train(tmp_path, endpoint, f"data.tokens={tokens}")
    assert done.returncode == 0, done.stderr[-3000:]
    (about,) = (verify(path.parent, "") for path in tmp_path.glob(".cache/*/manifest.json"))
    assert about["train_tokens"] >= 4000 and (tokens == "null" or about["train_tokens"] < 4100)
    assert any(
        COMMIT in path for path in asked
    )  # the commit that the key of the cache names is the one that is read


@pytest.mark.parametrize(
    "words, value",
    [
        (["data.repo=someone/absent"], "absent"),
        (["data.text_field=body"], "body"),
        (["data.train=absent"], "absent"),
    ],
)
def test_a_dataset_that_is_not_there_is_a_line_and_a_code(tmp_path, hub, words, value):
    done = train(tmp_path, hub[0], *words)
    lines = done.stderr.splitlines()
    assert (
        done.returncode == 2
        and lines[-1].startswith("error: ")
        and value in lines[-1]
        and "fix: " in lines[-1]
    )
    assert not (tmp_path / "runs").exists()
