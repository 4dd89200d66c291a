"""The life of a link, with a broker that refuses in every way; no sockets."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import aio_pika
import pytest
from aiormq.exceptions import ConnectionClosed, InvalidFrameError, ProbableAuthenticationError

from inferq.amqp import BrokerRefuses, BrokerUnreachable, Link, refusal
from inferq.settings import BrokerSettings

URL = "amqp://nina:secret@broker.example/shop"
SETTINGS = BrokerSettings.model_validate({"url": URL, "reconnect_min_s": 0.001, "reconnect_max_s": 0.002})
WRONG_PASSWORD = ProbableAuthenticationError("ACCESS_REFUSED - Login was refused")
NO_VHOST = InvalidFrameError("Expected one of ['Connection.OpenOk'], got <Connection.Close object at 0x7f>")
ODD = InvalidFrameError("Expected one of ['Channel.OpenOk'], got <Connection.Close object at 0x7f>")
CLOSED = ConnectionClosed(320, "CONNECTION_FORCED - broker forced connection closure")
AWAY = ConnectionRefusedError("nobody listens")


@pytest.fixture
def broker_says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[BaseException]]:
    """Connecting raises these errors, one after the other, and the last of them for ever."""

    def say(*errors: BaseException) -> list[BaseException]:
        left, seen = list(errors), []

        async def connect(*_args: Any, **_options: Any) -> None:
            error = left.pop(0) if len(left) > 1 else left[0]
            seen.append(error)
            raise error

        monkeypatch.setattr(aio_pika, "connect", connect)
        return seen

    return say


@contextlib.asynccontextmanager
async def living(link: Link) -> AsyncIterator[Link]:
    life = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - bounded above
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WRONG_PASSWORD, "does not let user 'nina' in: mend user and password in broker.url"),
        (NO_VHOST, "does not open vhost 'shop' to user 'nina': mend broker.url, or make the vhost"),
    ],
)
async def test_a_refusal_is_final_at_once_and_names_what_to_mend(
    error: BaseException, said: str, broker_says: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    broker_says(error)
    link = Link(SETTINGS, name="test")
    waiting = asyncio.create_task(link.wait_up(60))
    await asyncio.sleep(0)
    async with living(link):
        with pytest.raises(BrokerRefuses, match=said) as raised:
            async with asyncio.timeout(5):
                await waiting

    assert "secret" not in str(raised.value)
    # It was raised, so it is not logged as well.
    assert caplog.records == []


@pytest.mark.parametrize("error", [AWAY, ODD, CLOSED])
def test_what_may_pass_is_no_refusal(error: BaseException) -> None:
    assert refusal(error, URL) is None


async def test_a_broker_that_is_away_is_waited_for_and_named_in_the_end(broker_says: Callable[..., object]) -> None:
    broker_says(AWAY)
    async with living(Link(SETTINGS, name="test")) as link:
        with pytest.raises(BrokerUnreachable, match="ConnectionRefusedError: nobody listens"):
            await link.wait_up(0.05)


async def test_the_log_has_one_line_for_each_reason(
    broker_says: Callable[..., list[BaseException]], caplog: pytest.LogCaptureFixture
) -> None:
    seen = broker_says(AWAY, AWAY, WRONG_PASSWORD)
    async with living(Link(SETTINGS, name="test")):
        await until(lambda: len(seen) > 5)

    reasons = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(reasons) == 2
    assert "nobody listens" in reasons[0]
    assert "user 'nina'" in reasons[1]


async def test_the_last_error_says_something_as_long_as_the_link_is_down(broker_says: Callable[..., object]) -> None:
    broker_says(AWAY)
    link = Link(SETTINGS, name="test")
    assert link.last_error == "not connected yet"
    async with living(link):
        await until(lambda: link.last_error != "not connected yet")
        assert "nobody listens" in str(link.last_error)


async def test_a_link_that_was_up_and_was_closed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(SETTINGS, name="test", on_up=None)

    class Connection:
        transport = type("Transport", (), {})()

        async def close(self) -> None:
            return

    closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    Connection.transport.connection = type("Raw", (), {"closing": closing})()

    async def connect(*_args: Any, **_options: Any) -> Connection:
        return Connection()

    monkeypatch.setattr(aio_pika, "connect", connect)
    async with living(link):
        await link.wait_up(5)
        up_error = link.last_error

    assert up_error is None
    assert link.last_error == "closed by us"


async def test_a_cancellation_that_nobody_asked_for_does_not_end_a_link(
    broker_says: Callable[..., list[BaseException]],
) -> None:
    seen = broker_says(asyncio.CancelledError(), asyncio.CancelledError(), AWAY)
    async with living(Link(SETTINGS, name="x")) as link:
        await until(lambda: len(seen) > 3)
        assert "ConnectionRefusedError" in (link.last_error or "")
