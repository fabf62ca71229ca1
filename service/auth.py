"""API keys: ``Authorization: Bearer KEY`` on every path but the open ones.

Basic authentication with a key as the password (and any user name) does as well: it is what a browser can
send, so that the live page can be opened.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""What load balancers and orchestrators poll needs no key; ``/metrics`` does."""
PAGE = "/dashboard"
"""Where people come with a browser, which asks them for the key at this challenge only."""
_BROWSER_CHALLENGE = 'Basic realm="Eyas: any user name, an API key as the password", charset="UTF-8"'


class ApiKeys:
    """A set of keys, compared in time that depends on neither the key nor the guess."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so the comparison does not tell the key's either.
        self._digests = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, credential: bytes) -> bool:
        """Whether ``credential`` is one of the keys. Every key is looked at, whichever matches."""
        digest = hashlib.sha256(credential).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


class AuthMiddleware:
    """Answers 401 to a request without exactly one ``Authorization`` header that holds a known key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._authorised(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "A valid API key is needed: send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": _BROWSER_CHALLENGE if scope["path"] == PAGE else "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _authorised(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, credential = values[0].partition(b" ")
        match scheme.lower():
            case b"bearer":
                return self._keys.match(credential.strip())
            case b"basic":
                return self._keys.match(_password(credential.strip()))
        return False


def _password(credential: bytes) -> bytes:
    """The password of a Basic credential; empty, which is no key, where there is none."""
    try:
        return base64.b64decode(credential, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
