"""Keeps the keys of an authenticator current. A file is read again when it changes. An issuer's URL is fetched
periodically, and when a token names an unknown key. If reading fails, the fault is logged and reading is tried again;
the old keys are accepted until they are older than `security.auth.max_stale_s`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from router.auth.api_keys import KeyTable
from router.auth.authenticator import Authenticator
from router.auth.jwks import FETCH_TIMEOUT_S, SigningKeys, fetch_jwks, read_jwks
from router.auth.jwt_tokens import JwtVerifier
from router.auth.keys_file import read_keys
from router.auth.principal import AccessLevel, Principal
from tandem.clock import Clock
from tandem.config.auth import AuthSpec, JwtSpec
from tandem.errors import ConfigError, UnavailableError

log = logging.getLogger(__name__)

POLL_S = 0.5
REFETCH_S = 300.0
MOST_POLLS = 32  # between two tries to read a content that could not be read
RETRY_S = 10.0  # the least time between two fetches because of unknown keys or failed fetches


Identity = tuple[int, int, int, int] | None


class WatchedFile:
    """`current_s`: when the content in use was last known to be the file's, on `clock`.

    Args: `read` loads the file, and raises ConfigError if it cannot.
    """

    def __init__(self, path: Path, read: Callable[[Path], None], clock: Clock) -> None:
        """Raises ConfigError."""
        self._path = path
        self._read = read
        self._clock = clock
        self._loaded = self._identity()
        self._failed: Identity | Literal["none"] = "none"  # what was logged as unreadable
        self._tries = 0  # to read that
        self._polls = 0  # since the last of them
        read(path)
        self.current_s = clock.now_s()

    def poll(self) -> None:
        """Reads the file if it has changed, and again while it cannot be read, ever more rarely."""
        if (identity := self._identity()) != self._loaded or identity is None:
            if identity != self._failed:
                self._tries = self._polls = 0
            self._polls += 1
            if self._polls < min(1 << self._tries, MOST_POLLS):
                return
            self._polls, self._tries = 0, self._tries + 1
            if (error := self._error()) is not None:
                if identity != self._failed:
                    log.error("%s; the content loaded before stays in use", error)
                self._failed = identity
                return
            log.info("reloaded", extra={"file": str(self._path)})
            self._loaded = identity
        self._failed = "none"
        self.current_s = self._clock.now_s()

    def _error(self) -> str | None:
        """None if the file was read."""
        try:
            self._read(self._path)
        except ConfigError as error:
            return error.message
        except Exception as error:  # a bug in reading one content must not end the watch
            return f"{self._path} cannot be read: {error!r}"
        return None

    def _identity(self) -> Identity:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


class FetchedKeys:
    """The signing keys at a URL. `current_s`: when they were last fetched, on the clock; at first: the start."""

    def __init__(self, spec: JwtSpec, verifier: JwtVerifier, clock: Clock, max_stale_s: float) -> None:
        self._refetch_s = min(REFETCH_S, max_stale_s / 2)
        self._url = spec.jwks_url or ""
        self._algorithms = tuple(spec.algorithms)
        self._verifier = verifier
        self._clock = clock
        self._fetching = asyncio.Lock()
        self._fetch: asyncio.Future[SigningKeys] | None = None  # the last; it may outlast the wait for it
        self._tried_s: float | None = None
        self._current: SigningKeys | None = None
        self.current_s = clock.now_s()

    async def refresh(self, min_age_s: float = RETRY_S) -> None:
        """Fetches them, unless the last attempt was less than `min_age_s` ago. Waits FETCH_TIMEOUT_S for another's
        fetch, and as long for its own."""
        asked_s = self._clock.now_s()
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                await self._fetching.acquire()
        except TimeoutError:
            return
        try:
            if self._tried_s is None or asked_s - self._tried_s >= min_age_s:
                await self._refetch()
        finally:
            self._fetching.release()

    async def _refetch(self) -> None:
        try:
            keys = await self._fetched()
        except ConfigError as error:
            log.error("%s; the keys fetched before stay in use", error.message)
            return
        finally:
            self._tried_s = self._clock.now_s()
        self.current_s = self._tried_s
        if keys != self._current:
            self._verifier.set_keys(keys)
            self._current = keys
            log.info("signing keys fetched", extra={"keys": len(keys)})

    async def _fetched(self) -> SigningKeys:
        """One thread at a time: an issuer that sends byte by byte may hold it for hours. Raises ConfigError."""
        late = ConfigError(f"security.auth.jwt.jwks_url: {self._url}: expected an answer within {FETCH_TIMEOUT_S:g} s")
        if self._fetch is not None and not self._fetch.done():
            raise late
        loop = asyncio.get_running_loop()
        self._fetch = loop.run_in_executor(None, fetch_jwks, self._url, self._algorithms)
        self._fetch.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps none waits for it
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await asyncio.shield(self._fetch)
        except TimeoutError:
            raise late from None

    async def run(self) -> None:
        while True:
            await self.refresh(0.0)
            await asyncio.sleep(self._refetch_s if self.current_s == self._tried_s else RETRY_S)


class KeyRefresh:
    """The keys file and the JWKS that `auth` names. `start` needs a running event loop."""

    def __init__(self, auth: AuthSpec, clock: Clock, poll_s: float = POLL_S) -> None:
        """Reads the files, and from `start` on again as they change. Raises ConfigError."""
        self._poll_s = poll_s
        self._clock = clock
        self._max_stale_s = auth.max_stale_s
        self.authenticator = Authenticator(None if auth.jwt is None else JwtVerifier(auth.jwt), auth.api_key_sha256)
        self._files: list[WatchedFile] = []
        self._fetched: FetchedKeys | None = None
        self._tasks: list[asyncio.Task[None]] = []
        if auth.keys_file is not None:
            self._files.append(WatchedFile(Path(auth.keys_file), self._take_keys, clock))
        verifier, spec = self.authenticator.jwt, auth.jwt
        if verifier is None or spec is None:
            return
        if spec.jwks_file is None:
            self._fetched = FetchedKeys(spec, verifier, clock, auth.max_stale_s)
            return
        algorithms = tuple(spec.algorithms)

        def take_signing_keys(path: Path) -> None:
            verifier.set_keys(read_jwks(path, algorithms))

        self._files.append(WatchedFile(Path(spec.jwks_file), take_signing_keys, clock))

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._watch(), name="auth-files"))
        if self._fetched is not None:
            self._tasks.append(asyncio.create_task(self._fetched.run(), name="auth-jwks"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def identify(self, authorization: str | None, access: AccessLevel) -> Principal:
        """As `Authenticator.identify`. Raises UnavailableError if a revocation may have been missed."""
        principal = self.authenticator.identify(authorization, access)
        sources: list[WatchedFile | FetchedKeys] = [*self._files]
        if self._fetched is not None:
            sources.append(self._fetched)
        now_s = self._clock.now_s()
        stale_s = now_s - min((each.current_s for each in sources), default=now_s)
        if stale_s > self._max_stale_s:
            raise UnavailableError(
                f"authorization: the router could not read its keys for {stale_s:.0f} s, and accepts none after "
                f"{self._max_stale_s:g} s (security.auth.max_stale_s): its log names the file or URL"
            )
        return principal

    async def refresh(self) -> None:
        """Fetches the issuer's keys, as a token names an unknown one."""
        if self._fetched is not None:
            await self._fetched.refresh()

    def _take_keys(self, path: Path) -> None:
        self.authenticator.keys = KeyTable(read_keys(path))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            for file in self._files:
                await asyncio.to_thread(file.poll)  # thousands of keys take seconds
