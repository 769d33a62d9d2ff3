"""Messages sent from a thread that computes reach the other end, whatever the socket takes at once."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from tandem.rpc.channel import Channel, ThreadSender


class Note(msgspec.Struct, frozen=True, tag=True):
    number: int
    body: bytes = b""


async def _ends() -> tuple[ThreadSender, asyncio.StreamWriter, Channel[Note], asyncio.StreamWriter]:
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_unix_connection(sock=ours)
    reader, answering = await asyncio.open_unix_connection(sock=theirs)
    return ThreadSender(writer), writer, Channel(reader, answering, Note), answering


async def test_nothing_is_lost_or_reordered_when_the_reader_is_slow() -> None:
    sender, writer, channel, answering = await _ends()
    notes = [Note(number, bytes(number * 997 % 50_000)) for number in range(400)]  # far more than a socket holds

    def send() -> None:
        for first in range(0, len(notes), 4):
            sender.send(*notes[first : first + 4])

    sending = asyncio.create_task(asyncio.to_thread(send))
    messages = aiter(channel)
    got = [await anext(messages)]
    await sending  # never waited for us
    got += [await anext(messages) for _ in notes[1:]]
    assert got == notes
    sender.send(Note(1))  # the way is free again
    assert await anext(messages) == Note(1)
    sender.close()
    writer.close()
    assert [message async for message in messages] == []
    answering.close()


async def test_a_connection_that_ended_drops_messages_quietly() -> None:
    sender, writer, _, answering = await _ends()
    answering.close()
    await answering.wait_closed()
    for number in range(3):
        await asyncio.to_thread(sender.send, Note(number, bytes(1 << 20)))
        assert sender.unsent_bytes == 0
    sender.close()
    await asyncio.to_thread(sender.send, Note(3))
    assert sender.unsent_bytes == 0
    writer.close()


async def test_what_is_left_of_a_message_goes_with_its_connection() -> None:
    sender, writer, channel, answering = await _ends()
    await asyncio.to_thread(sender.send, Note(0, bytes(8 << 20)))
    assert sender.unsent_bytes > 0
    sender.close()
    sender.close()  # as when a link ends while its worker does
    assert sender.unsent_bytes == 0
    await asyncio.sleep(0)  # the loop was asked to go on with the rest
    writer.close()
    assert [message async for message in channel] == []
    answering.close()
