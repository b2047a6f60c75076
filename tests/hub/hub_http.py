"""Reading requests and writing answers for the local Hub, with the faults it is told to make."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .hub_storage import HubError, write


@dataclass
class Fault:
    """What is to go wrong, from the `first` matching request on, `times` times.

    With a status: that is the answer. Without: the connection is cut when half of the request's body has arrived, or
    half of what was asked for with GET is sent. With `action`: that is done first, and all goes on as usual.
    """

    method: str
    path: str
    status: int | None
    first: int
    times: int
    message: str
    headers: dict[str, str]
    action: Callable[[], Any] | None = None
    seen: int = 0


@dataclass
class Request:
    method: str
    path: str
    received: int  # bytes of its body
    status: int | None = None
    token: str | None = field(default=None, repr=False)


class Handler(BaseHTTPRequestHandler):
    """Reads requests, makes the wished faults, writes answers."""

    hub: Any  # the LocalHub
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        self.url = urlsplit(self.path)
        self.query = parse_qs(self.url.query)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.seen = Request(self.command, unquote(self.url.path), 0, token=token)
        with self.hub.lock:
            self.hub.requests.append(self.seen)
        fault = self.due_fault()
        if fault is not None and fault.action is not None:
            fault.action()
            fault = None
        self.halved = fault is not None and fault.status is None and self.command == "GET"
        if self.halved:
            fault = None
        self.body = self.read_body(cut=fault is not None and fault.status is None)
        if fault is not None and fault.status is None:
            self.connection.close()
            self.close_connection = True
            return
        try:
            if fault is not None:
                return self.answer(
                    {"error": fault.message}, fault.status, **{"X-Error-Message": fault.message} | fault.headers
                )
            self.respond()
        except HubError as error:
            code = {"X-Error-Code": error.code} if error.code else {}
            self.answer({"error": error.message}, error.status, **{"X-Error-Message": error.message} | code)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def respond(self) -> None:
        raise NotImplementedError

    def due_fault(self) -> Fault | None:
        with self.hub.lock:
            due = None
            for fault in self.hub.faults:
                if fault.method == self.command and re.search(fault.path, self.seen.path):
                    fault.seen += 1
                    if due is None and fault.first <= fault.seen < fault.first + fault.times:
                        due = fault
            return due

    def read_body(self, cut: bool) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
                if cut:
                    break
            else:
                self.rfile.readline()
            body = b"".join(parts)
        else:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length // 2 if cut else length)
        self.seen.received = len(body)
        return body

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        self.seen.status = status
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if not isinstance(content, bytes):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self.halved else body)
            self.close_connection = self.close_connection or self.halved

    def answer_file(self, content: bytes, **headers: str) -> None:
        """With `Range: bytes=START-[END]`."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self.answer(content, 200, **{"Accept-Ranges": "bytes"} | headers)
        start, end = int(wanted[1]), min(int(wanted[2] or len(content) - 1), len(content) - 1)
        if start >= len(content):
            return self.answer(b"", 416, **{"Content-Range": f"bytes */{len(content)}"})
        self.answer(
            content[start : end + 1], 206, **{"Content-Range": f"bytes {start}-{end}/{len(content)}"} | headers
        )

    def log_message(self, *words: Any) -> None:
        pass


class Storage(Handler):
    """Large files by their hash, behind signed addresses: no token may come here."""

    def respond(self) -> None:
        if self.headers.get("Authorization"):
            raise HubError(400, "a token was sent to the storage provider")
        oid, *part = self.url.path.strip("/").split("/")[1:]
        place = self.hub.folder / "lfs" / oid
        if self.command in ("GET", "HEAD"):
            self.answer_file(place.read_bytes(), ETag=f'"{oid}"')
        elif part:
            write(self.hub.folder / "parts" / oid / part[0], self.body)
            self.answer({}, ETag=f'"part-{part[0]}"')
        else:
            if hashlib.sha256(self.body).hexdigest() != oid:
                raise HubError(400, "the content does not have this hash")
            write(place, self.body)
            self.answer({})
