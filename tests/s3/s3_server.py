"""A real S3 server in a process of its own, which throttles, cuts and refuses as it is told.

``with s3_server() as server:`` starts moto behind a middleware; ``server.url`` is its endpoint.
It knows one access key; with another, requests end as S3 ends them (403, InvalidAccessKeyId).
``server.fail(...)`` answers requests with an S3 error, ``server.shorten(...)`` gives half of a
body, ``server.requests()`` lists what was asked.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

KEY, SECRET = "AKIATESTKEY", "a-secret-that-no-message-may-show"
_CONTROL = "/_control"


class S3Server:
    """The controls of a running server.

    Attributes:
        url: Its endpoint.
        options: ``storage_options`` that reach it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.options = {"endpoint_url": url, "key": KEY, "secret": SECRET}

    def fail(self, status: int, code: str, *, method="GET", name="", times=1) -> None:
        """Answer the next requests of a method on keys that contain ``name`` with an error."""
        self._ask({"status": status, "code": code, "method": method, "name": name, "times": times})

    def shorten(self, *, name: str = "", times: int = 1) -> None:
        """Give half of the object in the next answers, as if it were the whole."""
        self._ask({"status": 0, "code": "", "method": "GET", "name": name, "times": times})

    def heal(self) -> None:
        """No more faults, and no requests asked so far."""
        self._ask({"heal": True})

    def requests(self) -> list[str]:
        """``"METHOD path?query"`` of every request since the last ``heal``."""
        return self._ask({})

    def _ask(self, what: dict):
        body = json.dumps(what).encode()
        with urllib.request.urlopen(f"{self.url}{_CONTROL}", body, timeout=150) as answer:
            return json.load(answer)


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server for the block."""
    command = [sys.executable, os.path.abspath(__file__)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield S3Server(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class _Faulty:
    """WSGI middleware: faults, credentials, and the record of requests."""

    def __init__(self, app) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._faults: list[dict] = []
        self._requests: list[str] = []

    def __call__(self, environ, start_response):
        if environ["PATH_INFO"] == _CONTROL:
            return self._control(environ, start_response)
        fault = self._meet(environ)
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            fault = {"status": 403, "code": "InvalidAccessKeyId"}
        if fault is None:
            return self._app(environ, start_response)
        if fault["status"]:
            return _error(fault, start_response)
        return self._half(environ, start_response)

    def _control(self, environ, start_response):
        what = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self._lock:
            if what.get("heal"):
                self._faults, self._requests = [], []
            elif what:
                self._faults.append(what)
            answer = json.dumps(self._requests).encode()
        start_response("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]

    def _meet(self, environ) -> dict | None:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self._requests.append(f"{method} {path}?{environ['QUERY_STRING']}")
            for fault in self._faults:
                if fault["times"] and fault["method"] == method and fault["name"] in path:
                    fault["times"] -= 1
                    return fault
        return None

    def _half(self, environ, start_response):
        answer = {}

        def keep(status, headers, *_):
            answer.update(status=status, headers=headers)

        body = b"".join(self._app(environ, keep))
        body = body[: len(body) // 2]
        headers = [(k, v) for k, v in answer["headers"] if k.lower() not in _OF_THE_WHOLE]
        start_response(answer["status"], [*headers, ("Content-Length", str(len(body)))])
        return [body]


def _error(fault: dict, start_response):
    body = f"<?xml version='1.0'?><Error><Code>{fault['code']}</Code><Message>no</Message></Error>"
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    start_response(f"{fault['status']} Fault", headers)
    return [body.encode()]


_OF_THE_WHOLE = ("content-length", "x-amz-checksum-crc32", "x-amz-checksum-crc64nvme")


def _serve() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    app = _Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(f"http://127.0.0.1:{server.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
