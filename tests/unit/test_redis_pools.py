"""How Redis pools are opened: what waits for how long. No connection is made."""

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
