"""How Redis pools are opened: what waits for how long. No connection is made."""

import pytest
from pydantic import SecretStr, ValidationError
from redis.asyncio import BlockingConnectionPool

from inferq.redis_pools import open_redis
from inferq.settings import RedisSettings


async def test_who_is_patient_never_takes_a_busy_pool_for_a_server_that_is_away() -> None:
    settings = RedisSettings(max_connections=3, socket_timeout_s=1.5)
    hasty, patient = open_redis(settings, retries=0), open_redis(settings, retries=0, patient=True)
    timeouts = []
    for client in (hasty, patient):
        assert isinstance(client.connection_pool, BlockingConnectionPool)
        timeouts.append(client.connection_pool.timeout)
        await client.aclose()
    assert timeouts == [1.5, None]


@pytest.mark.parametrize(
    ("query", "mend"),
    [
        ("foo=S3CRET", "foo"),
        ("decode_responses=S3CRET", "decode_responses"),
        ("max_connections=S3CRET", "max_connections (use max_connections)"),
        ("db=3&socket_timeout=S3CRET", "socket_timeout (use socket_timeout_s)"),
        ("ssl_cert_reqs=S3CRET", "ssl_cert_reqs"),
        ("password=S3CRET", "password (use password_file)"),
        ("db=S3CRET", "db must be a number"),
    ],
)
def test_options_that_would_outrank_our_knobs_are_named_without_their_values(query: str, mend: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RedisSettings(url=SecretStr(f"redis://:S3CRET@127.0.0.1:6379/0?{query}"))
    assert mend in str(caught.value)
    assert "S3CRET" not in str(caught.value)


async def test_the_database_may_stand_among_the_options() -> None:
    client = open_redis(RedisSettings(url=SecretStr("unix:///run/redis.sock?db=3")), retries=0)
    assert client.connection_pool.connection_kwargs["db"] == 3
    await client.aclose()
