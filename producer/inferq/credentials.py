"""Who logs in to a server, and with what: read anew for every connection, so that secrets rotate without a restart.

The files are those that the settings name. Nothing read here is kept, logged, or part of an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

    from inferq.settings import ServerSection

__all__ = ["Login", "SecretFileError", "address", "login_of", "read_secret"]

_MOST_BYTES: Final = 4096


class SecretFileError(OSError):
    """A file with a secret cannot be used; the message names its knob and the file, never what is in it."""


@dataclass(frozen=True, slots=True)
class Login:
    """A user and a password.

    Attributes:
        user: None = the server's default.
        password: None = none is sent.
    """

    user: str | None
    password: str | None = field(repr=False)


def login_of(server: ServerSection) -> Login:
    """The login as it is at this moment: from the files where they are named, otherwise from the url.

    Raises:
        SecretFileError: a named file cannot be read, or is empty.
    """
    parts = urlsplit(server.url.get_secret_value())
    user = parts.username and unquote(parts.username)
    password = parts.password and unquote(parts.password)
    if server.user_file is not None:
        user = read_secret(server.user_file, "user_file")
    if server.password_file is not None:
        password = read_secret(server.password_file, "password_file")
    return Login(user or None, password or None)


def address(server: ServerSection) -> str:
    """The url to connect to now, login included: for the library that connects and for nobody else.

    Raises:
        SecretFileError: as `login_of`.
    """
    url = server.url.get_secret_value()
    if server.user_file is None and server.password_file is None:
        return url
    login = login_of(server)
    parts = urlsplit(url)
    # Never an empty part: the library would fall back to its own default login.
    user, password = quote(login.user or "guest", safe=""), quote(login.password or "guest", safe="")
    return parts._replace(netloc=f"{user}:{password}@{parts.netloc.rpartition('@')[2]}").geturl()


def read_secret(path: Path, knob: str) -> str:
    """A secret from its file, without the newline that editors add.

    Raises:
        SecretFileError: missing, unreadable, empty, not UTF-8, or longer than any password.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        secret = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        # `from None`: the cause repeats the bytes.
        raise SecretFileError(f"{knob} {path} is not UTF-8 text") from None
    except OSError as error:
        raise SecretFileError(f"{knob} {path} cannot be read: {error.strerror or type(error).__name__}") from None
    if not secret or len(raw) > _MOST_BYTES:
        raise SecretFileError(f"{knob} {path} {'is empty' if not secret else f'has more than {_MOST_BYTES} bytes'}")
    return secret
