"""The client of HTTP servers that sample.

It is ``http.client`` from the standard library. A request takes as long as a completion, so a connection of its own
costs nothing, and closing the connection from another thread is how a request is cancelled. No HTTP library is a
dependency of Cohort.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from contextlib import suppress
from email.utils import parsedate_to_datetime
from threading import Lock
from time import time
from typing import Any
from urllib.parse import urlencode, urlsplit

from cohort.errors import ConfigError
from cohort.rollout.served.protocol import ServerError


class Client:
    """One server. Its methods may be called from several threads at the same time.

    Args:
        url: ``http://HOST:PORT``.
        setting: names the address in errors.
        public: the address may be on the internet, with https and a path.
        key: goes with every request, as a bearer token.

    Raises:
        ConfigError: the address is malformed.
    """

    def __init__(self, url: str, *, setting: str = "server.url", public: bool = False, key: str = "") -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        path = parts.path.rstrip("/")
        right = parts.scheme in ("http", "https") if public else parts.scheme == "http" and not path
        if not right or not parts.hostname or port == 0 or parts.query:
            example = "https://api.openai.com/v1" if public else "http://127.0.0.1:8000"
            raise ConfigError(f"{setting}: expected an address such as {example!r}, got {url!r}")
        self.secure = parts.scheme == "https"
        self.host, self.port = parts.hostname, port or (443 if self.secure else 80)
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{parts.scheme}://{shown}:{self.port}{path}"
        self._path, self._key = path, key
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def get(self, path: str, *, timeout: float = 60.0) -> Any:
        """As ``post``, with the method GET."""
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: Any = None, *, timeout: float = 60.0, plain: bool = False, **query: str) -> Any:
        """Send a request; return the decoded JSON of the answer, None if it is empty.

        Args:
            path: of the route.
            body: is sent as JSON. None: nothing.
            timeout: seconds without a byte from the server.
            plain: the answer is text, which is returned as it is.
            query: parameters in the address.

        Raises:
            ServerError: no connection, no answer in time, a status other than 2xx, or an answer that is not JSON.
        """
        return self._request("POST", f"{path}?{urlencode(query)}" if query else path, body, timeout, plain=plain)

    def _request(self, method: str, target: str, body: Any, timeout: float, *, plain: bool = False) -> Any:
        path = target.partition("?")[0]
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout)
        with self._lock:
            self._open.add(connection)
        try:
            content = None if body is None else json.dumps(body).encode()
            headers = {"Connection": "close", "Accept": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            if content is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, self._path + target, content, headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except TimeoutError:
            raise ServerError(self.url, path, f"no answer within {timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(self.url, path, _words(error)) from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if not 200 <= status < 300:
            after = _seconds(response.headers.get("Retry-After"))
            raise ServerError(self.url, path, f"status {status}: {_message(text)}", status, after)
        if plain:
            return text.decode(errors="replace")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            raise ServerError(self.url, path, f"the answer is not JSON: {text[:80]!r}") from None

    def disconnect(self) -> None:
        """See ``Server``."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            if connection.sock is not None:
                with suppress(OSError):  # closed already
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def text(self, path: str, name: str) -> str:
        """A text in the answer of a route. Raises ``ServerError`` without it."""
        answer = self.get(path)
        if not isinstance(answer, dict) or not isinstance(answer.get(name), str):
            raise ServerError(self.url, path, f"expected a {name}, got {answer!r:.80}")
        return str(answer[name])

    def check_private(self) -> None:
        """Check that the address is on the loopback device or on a private network.

        The routes for weights have no access control: whoever reaches them can replace the model or run code.

        Raises:
            ConfigError: it is not, or the name is unknown.
        """
        try:
            found = {info[4][0] for info in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)}
        except OSError as error:
            raise ConfigError(f"server.url {self.url}: the name {self.host!r} is unknown ({_words(error)})") from None
        public = sorted(str(one) for one in found if ipaddress.ip_address(str(one).partition("%")[0]).is_global)
        if public:
            raise ConfigError(
                f"server.url {self.url} is a public address ({', '.join(public)}). Weights are sent to it through "
                "routes without access control: use a loopback or private address, or a tunnel such as ssh -L"
            )


def _words(error: Exception) -> str:
    """An exception in words."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def _seconds(retry_after: str | None) -> float | None:
    """How long a server asks to wait: its header has seconds, or a date (RFC 9110, 10.2.3). None: it does not say."""
    if retry_after is None:
        return None
    try:
        return float(retry_after) if retry_after.isdigit() else parsedate_to_datetime(retry_after).timestamp() - time()
    except ValueError:
        return None


def _message(text: bytes) -> str:
    """What an error's answer says: the message of FastAPI's JSON, else the text."""
    try:
        found = json.loads(text)
    except ValueError:
        found = text.decode(errors="replace")
    if isinstance(found, dict):
        error = found.get("error", found.get("detail", found))
        found = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(found).split())[:300] or "no message"
