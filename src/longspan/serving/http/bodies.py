"""Reading the bodies of requests: each is limited, and so are all of them together."""

from __future__ import annotations

from starlette.types import Message, Receive

from longspan.serving.http.errors import ApiError


class Bodies:
    """Bytes of bodies that are in memory now."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0

    def begin(self, limit: int) -> Body:
        """For a body of at most `limit` bytes; `end` must follow."""
        return Body(self, limit)

    def add(self, size: int) -> None:
        self._held += size
        if self._held > self._most:
            raise ApiError(
                429,
                "other requests need all memory for bodies",
                "too_large_now",
                headers={"Retry-After": "1"},
            )

    def remove(self, size: int) -> None:
        self._held -= size


class Body:
    """One body; it counts until `end`."""

    def __init__(self, bodies: Bodies, limit: int) -> None:
        self._bodies, self._limit, self._size = bodies, limit, 0

    async def read(self, receive: Receive) -> bytes | None:
        """The whole body, None if the client is gone. It is refused as soon as it is too large."""
        parts, more = list[bytes](), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            parts.append(part)
            more, self._size = message.get("more_body", False), self._size + len(part)
            self._bodies.add(len(part))
            if self._size > self._limit:
                raise too_large(self._limit)
        return b"".join(parts)

    def end(self) -> None:
        self._bodies.remove(self._size)


def too_large(most: int) -> ApiError:
    """The answer to a body that is larger than `most` bytes."""
    return ApiError(413, f"the body may have at most {most} bytes", "body_too_large")


def replayed(body: bytes, receive: Receive) -> Receive:
    """First the body, then what follows: the end of the connection."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
