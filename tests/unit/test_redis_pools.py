"""How Redis pools are opened: what waits for how long. No connection is made."""

import pytest
from pydantic import SecretStr
from redis.asyncio import BlockingConnectionPool

from inferq.configuration import ConfigurationError
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


@pytest.mark.parametrize("query", ["foo=S3CRET", "socket_timeout=S3CRET", "ssl_check_hostname=yes&foo=S3CRET"])
async def test_options_that_no_connection_takes_are_named_without_their_values(query: str) -> None:
    settings = RedisSettings(url=SecretStr(f"redis://:S3CRET@127.0.0.1:6379/0?{query}"))
    with pytest.raises(ConfigurationError) as caught:
        open_redis(settings, retries=0)
    assert query.rpartition("&")[2].partition("=")[0] in str(caught.value)
    assert "S3CRET" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_options_of_the_library_are_taken() -> None:
    client = open_redis(RedisSettings(url=SecretStr("unix:///run/redis.sock?db=3")), retries=0)
    assert client.connection_pool.connection_kwargs["db"] == 3
    await client.aclose()
