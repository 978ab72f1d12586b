"""Server-sent events arrive in blocks that are cut anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from polar.engine.chunks import decode_chunk, event_blocks

CONTENT = st.lists(st.text(alphabet=st.characters(exclude_characters="\n\r"), min_size=1).filter(str.strip))


@given(CONTENT, st.lists(st.integers(1, 40), min_size=1))
def test_events_survive_any_cut(contents: list[str], cuts: list[int]) -> None:
    items = [f'"{len(content)}"'.encode() + content.strip().encode() + b"|" for content in contents]
    stream = b"".join(b"data: " + item + b"\n\n" for item in items) + b"data: [DONE]\n\ndata: after\n\n"

    async def blocks() -> AsyncIterator[bytes]:
        rest, index = stream, 0
        while rest:
            size = cuts[index % len(cuts)]
            yield rest[:size]
            rest, index = rest[size:], index + 1

    async def collect() -> list[bytes]:
        return [event async for events in event_blocks(blocks()) for event in events]

    assert asyncio.run(collect()) == items


def test_a_chunk_is_read_with_fields_that_we_do_not_know() -> None:
    chunk = decode_chunk(b'{"new":1,"choices":[{"index":0,"token_ids":[5],"finish_reason":"stop","other":null}]}')
    assert chunk.choices[0].token_ids == [5] and chunk.choices[0].finish_reason == "stop"
