"""Who may do what on a hardened Redis: an ACL file with a user for each role of `inferq_schemas.access`. Opens nothing.

Each pair of keys and commands stands in a selector of its own (Redis 7), so that a right to write one kind of key is no
right to write another. Keys are those of `inferq.keys` and of the worker's store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["REDIS_USERS", "acl_lines"]

# Commands, then the keys and channels they may touch: `~` read and write, `%R~` read, `%W~` write, `&` channel.
_SELECTORS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "inferq-client": (
        ("get mget", "%R~{p}:{{*}}:result %R~{p}:{{*}}:out:*"),
        ("set", "~{p}:{{*}}:result %W~{p}:{{*}}:in:*"),
        ("unlink", "%W~{p}:{{*}}:in:*"),
        ("subscribe unsubscribe", "&{p}:{{*}}:done &{p}:hints"),
        ("hgetall", "%R~{p}:paused"),
    ),
    "inferq-gpu": (
        ("mget set del expire", "~{p}:{{*}}:result"),
        ("mget", "%R~{p}:{{*}}:in:*"),
        ("set", "%W~{p}:{{*}}:out:*"),
        ("publish", "&{p}:{{*}}:done"),
        ("hset hdel hgetall", "~{p}:running"),
        ("set mget del", "~{p}:worker:*"),
        ("sadd smembers srem expire", "~{p}:gpu:*"),
        ("hgetall", "%R~{p}:cpu:* %R~{p}:paused"),
    ),
    "inferq-cpu": (
        ("mget set del expire", "~{p}:{{*}}:result"),
        ("mget", "%R~{p}:{{*}}:in:*"),
        ("set", "%W~{p}:{{*}}:out:*"),
        ("publish", "&{p}:{{*}}:done"),
        ("hset hdel hgetall", "~{p}:running"),
        ("set mget del", "~{p}:worker:*"),
        ("hset hkeys hdel expire", "~{p}:cpu:*"),
        ("hgetall", "%R~{p}:paused"),
    ),
    "inferq-operator": (
        ("get mget pttl getdel set", "~{p}:{{*}}:result"),
        ("exists expire", "~{p}:{{*}}:in:*"),
        ("get mget", "%R~{p}:{{*}}:out:* %R~{p}:worker:*"),
        ("hgetall hset hdel", "~{p}:paused"),
        ("hgetall smembers", "%R~{p}:running %R~{p}:cpu:* %R~{p}:gpu:*"),
        ("subscribe unsubscribe", "&{p}:{{*}}:done &{p}:hints"),
    ),
    "inferq-monitoring": (("info dbsize", ""),),
}
REDIS_USERS: Final = tuple(_SELECTORS)
"""Roles that use Redis; the topology's does not."""


def acl_lines(prefix: str, *, password_hashes: Mapping[str, str] | None = None) -> list[str]:
    """The lines of an ACL file (`aclfile` in redis.conf).

    Args:
        prefix: of the keys, `redis.prefix`; has no character that means something in a pattern.
        password_hashes: by user, SHA-256 in hexadecimal. A user without one cannot log in until
            `ACL SETUSER <user> '>password'` gives it one.
    """
    hashes = password_hashes or {}
    lines = ["user default off resetkeys resetchannels -@all"]
    for user, selectors in _SELECTORS.items():
        password = f"#{hashes[user]}" if user in hashes else "resetpass"
        grants = " ".join(_selector(commands, keys.format(p=prefix)) for commands, keys in selectors)
        lines.append(f"user {user} on {password} resetkeys resetchannels -@all +ping +select {grants}")
    return lines


def _selector(commands: str, keys: str) -> str:
    allowed = " ".join(f"+{command}" for command in commands.split())
    return f"(-@all {allowed} {keys})".replace(" )", ")")
