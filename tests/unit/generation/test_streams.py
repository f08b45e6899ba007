"""Streams: order, ends, blocking and asynchronous readers, closed event loops."""

import asyncio
import threading

from moeless.core.generation import TokenEvent
from moeless.engines.transformers.generation.streams import EventStream, deliver


def token(number, reason=None):
    return TokenEvent(request_id="r", token_ids=(number,), finish_reason=reason)


def ids(events):
    return [event.token_ids[0] for event in events]


async def read_all(stream):
    found = []
    while (event := await stream.next_event()) is not None:
        found.append(event)
    return found


def test_a_blocking_reader_gets_all_events_in_order_and_then_ends():
    stream = EventStream()
    writer = threading.Thread(
        target=lambda: [
            deliver([(stream, token(number, "stop" if number == 9 else None))])
            for number in range(10)
        ]
    )
    writer.start()
    assert ids(stream) == list(range(10))
    writer.join()
    assert list(stream) == []


def test_nothing_follows_the_last_event():
    stream = EventStream()
    assert deliver([(stream, token(1, "cancelled")), (stream, token(2))]) == [True, False]
    assert stream.ended
    assert ids(stream) == [1]


def test_an_asynchronous_reader_gets_events_from_another_thread_and_then_none():
    stream = EventStream()

    async def main():
        reader = asyncio.create_task(read_all(stream))
        await asyncio.sleep(0)  # let it wait first
        for number in range(5):
            await asyncio.to_thread(
                deliver, [(stream, token(number, "stop" if number == 4 else None))]
            )
        found = await reader
        assert await stream.next_event() is None
        return found

    assert ids(asyncio.run(main())) == [0, 1, 2, 3, 4]


def test_one_step_wakes_an_event_loop_once_for_all_its_streams(monkeypatch):
    streams = [EventStream() for _ in range(200)]

    async def main():
        loop = asyncio.get_running_loop()
        readers = [asyncio.create_task(read_all(stream)) for stream in streams]
        await asyncio.sleep(0)
        calls = []
        original = loop.call_soon_threadsafe

        def counted(callback, *args, **keywords):
            calls.append(getattr(callback, "__name__", ""))
            return original(callback, *args, **keywords)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        deliver([(stream, token(1, "stop")) for stream in streams])
        found = await asyncio.gather(*readers)
        assert calls.count("_wake") == 1
        return found

    assert [ids(events) for events in asyncio.run(main())] == [[1]] * 200


def test_a_reader_that_is_cancelled_loses_no_event():
    stream = EventStream()

    async def main():
        reader = asyncio.create_task(stream.next_event())
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        deliver([(stream, token(1)), (stream, token(2, "stop"))])
        return await read_all(stream)

    assert ids(asyncio.run(main())) == [1, 2]


def test_a_closed_event_loop_does_not_disturb_the_writer():
    stream, other = EventStream(), EventStream()
    loop = asyncio.new_event_loop()
    reader = loop.create_task(stream.next_event())
    loop.run_until_complete(asyncio.sleep(0))
    reader.cancel()
    loop.run_until_complete(asyncio.gather(reader, return_exceptions=True))
    loop.close()
    assert deliver([(stream, token(1)), (other, token(2, "stop"))]) == [True, True]
    assert ids(other) == [2]


def test_two_event_loops_can_read_at_the_same_time():
    streams = [EventStream(), EventStream()]
    found = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: asyncio.run(read_all(streams[i]))}))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for number in range(50):
        reason = "length" if number == 49 else None
        deliver([(stream, token(number, reason)) for stream in streams])
    for thread in threads:
        thread.join()
    assert ids(found[0]) == ids(found[1]) == list(range(50))
