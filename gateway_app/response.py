"""What one call answers, for each client that asks for it: the first, and those that repeat its request.

Agent programs give up and ask again, byte for byte. Such a repeat follows the response that is under way, or gets the
one that nobody received, from its beginning: one sample, however often it is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from gateway_app.call import Ending
from gateway_app.client import Client
from gateway_app.stopping import Stop, client_left

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

REJOIN_S = 2.0
"""After the last client has left: programs that ask again do so within about this time."""
REPLAYS = 1024
REPLAY_BYTES = 64 * 1024 * 1024
"""What is kept of responses that nobody received."""


class Response:
    """Written once, by the call; read by its clients.

    Each part is written by itself, also to those that come later: some clients take what comes together for one event.
    """

    def __init__(self, client: Client, stop: Stop, *, streamed: dict[str, str]) -> None:
        """``streamed``: the headers of a stream. ``stop`` is set when all clients have left for REJOIN_S."""
        self._streamed = streamed
        self._client: Client | None = client
        self._stop = stop
        self._head: tuple[int, dict[str, str]] | None = None
        self._parts: list[bytes] = []
        self._followers: set[Client] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._received = False
        self.ended = False
        self.kept: Ending | None = None
        """Of one that ended without anyone receiving it: where its late delivery is recorded."""
        self.last_write = time.monotonic()
        client.on_leave = self._left

    @property
    def started(self) -> bool:
        return self._head is not None

    @property
    def size(self) -> int:
        return sum(map(len, self._parts))

    @property
    def wanted(self) -> bool:
        """Whether a repeat of the request is to have it: it is not being stopped, and nobody has it yet."""
        return not (self._stop.is_set or self._received)

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self._head = (status, headers)
        if self._client is not None:
            await self._client.start(status, headers)

    async def open(self) -> None:
        """The headers of a stream, unless they are sent."""
        if self._head is None:
            await self.start(200, self._streamed)

    async def write(self, part: bytes) -> None:
        """More of a response; a stream opens itself."""
        await self.open()
        self._parts.append(part)
        self.last_write = time.monotonic()
        self._wake()
        if self._client is not None:
            await self._client.write(part)

    async def whole(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        """All of a JSON response."""
        await self.start(status, JSON | {"content-length": str(len(content))} | (headers or {}))
        await self.write(content)

    def close(self) -> None:
        """Nothing more follows."""
        self.ended = True
        self._wake()

    async def look(self) -> None:
        """Before the end is written: notices a client that has just left."""
        if self._client is not None:
            await self._client.look()

    def keep(self, ending: Ending) -> None:
        """Nobody has received it: it waits for a repeat, without what served it."""
        self.kept, self._client = ending, None

    async def finish(self) -> bool:
        """Nothing more follows. Whether any client has received it."""
        self.close()
        self._received = self._received or (self._client is not None and not self._client.gone)
        while not self._received and self._followers:
            await self._news()
        return self._received

    async def follow(self, client: Client) -> bool:
        """Gives ``client`` the response from its beginning to its end. Whether the client received it."""
        self._followers.add(client)
        client.on_leave = self._left
        try:
            sent = 0
            while not client.gone:
                if self._head is not None and not client.started:
                    await client.start(*self._head)
                if sent < len(self._parts):
                    sent += 1
                    if self.ended and sent == len(self._parts):
                        await client.look()
                    await client.write(self._parts[sent - 1])
                elif self.ended:
                    break
                else:
                    await self._news()
            received = self.ended and not client.gone
            self._received = self._received or received
            return received
        finally:
            self._followers.discard(client)
            self._wake()

    def _left(self) -> None:
        self._wake()
        if not self.ended and not self._watched():
            asyncio.get_running_loop().call_later(REJOIN_S, self._check_empty)

    def _check_empty(self) -> None:
        if not self.ended and not self._watched():
            self._stop.set(client_left())

    def _watched(self) -> bool:
        return (self._client is not None and not self._client.gone) or any(
            not client.gone for client in self._followers
        )

    async def _news(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()


class Responses:
    """By request: those under way, and, within limits, those that ended without anyone receiving them."""

    def __init__(self) -> None:
        self._under_way: dict[bytes, Response] = {}
        self._undelivered: OrderedDict[bytes, Response] = OrderedDict()
        self._bytes = 0

    def find(self, key: bytes) -> Response | None:
        found = self._under_way.get(key) or self._undelivered.get(key)
        return found if found is not None and found.wanted else None

    def add(self, key: bytes, response: Response) -> None:
        self._under_way[key] = response

    def settle(self, key: bytes, response: Response, *, keep: Ending | None) -> None:
        """It has ended. ``keep``: it was sampled and nobody has received it, so a repeat is to have it."""
        if self._under_way.get(key) is response:
            del self._under_way[key]
        if keep is None or not response.wanted:
            self._forget(key)
            return
        response.keep(keep)
        self._undelivered[key] = response
        self._bytes += response.size
        while len(self._undelivered) > REPLAYS or self._bytes > REPLAY_BYTES:
            self._forget(next(iter(self._undelivered)))

    def delivered(self, key: bytes) -> None:
        """One that was kept has been received."""
        self._forget(key)

    def drop(self, session_id: str, attempt: int) -> None:
        """Forgets what is kept of this attempt, which has ended, and of the lower ones."""
        for key, response in list(self._undelivered.items()):
            if response.kept and response.kept.session_id == session_id and response.kept.attempt <= attempt:
                self._forget(key)

    def _forget(self, key: bytes) -> None:
        if (old := self._undelivered.pop(key, None)) is not None:
            self._bytes -= old.size
