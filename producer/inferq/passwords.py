"""Passwords of a hardened deployment's users: a file for each, made where missing, and what servers keep of them."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from typing import TYPE_CHECKING

from inferq.credentials import read_secret

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["passwords_of", "rabbitmq_hash", "redis_hash"]


def passwords_of(folder: Path, users: Iterable[str]) -> dict[str, str]:
    """Read each user's password from the file of that name; one that is missing is made up and written, for us alone.

    Raises:
        OSError: the folder or a file cannot be used; the message names it and no password.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = {}
    for user in users:
        path = folder / user
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        found[user] = read_secret(path, "password file")
    return found


def rabbitmq_hash(password: str) -> str:
    """A password as RabbitMQ keeps it: base64 of four bytes of salt and SHA-256 of salt and password."""
    salt = secrets.token_bytes(4)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def redis_hash(password: str) -> str:
    """A password as Redis keeps it: SHA-256 in hexadecimal."""
    return hashlib.sha256(password.encode()).hexdigest()
