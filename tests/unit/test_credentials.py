"""Logins out of files: what is read, when, and what an error may say."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from inferq.credentials import Login, SecretFileError, address, login_of, read_secret
from inferq.settings import BrokerSettings

URL = SecretStr("amqp://me:p%40ss@broker.example:5999/v%2F1")


def test_without_files_the_login_is_that_of_the_url() -> None:
    settings = BrokerSettings(url=URL)
    assert login_of(settings) == Login("me", "p@ss")
    assert address(settings) == URL.get_secret_value()


def test_files_outrank_the_url_and_are_read_every_time(tmp_path: Path) -> None:
    password, user = tmp_path / "password", tmp_path / "user"
    settings = BrokerSettings(url=URL, password_file=password, user_file=user)
    user.write_text("vault-1\n")
    password.write_text("a/b:c@d e\r\n")
    assert address(settings) == "amqp://vault-1:a%2Fb%3Ac%40d%20e@broker.example:5999/v%2F1"
    password.write_text("second")
    assert login_of(settings) == Login("vault-1", "second")


def test_a_password_file_keeps_the_user_of_the_url(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    assert login_of(BrokerSettings(url=URL, password_file=tmp_path / "password")) == Login("me", "secret")


def test_a_login_does_not_print_its_password() -> None:
    assert "hunter2" not in repr(Login("me", "hunter2"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read: No such file"), (b"\n", "is empty"), (b"hunter2\xff", "UTF-8"), (b"h" * 5000, "4096")],
    ids=["missing", "empty", "not UTF-8", "long"],
)
def test_an_unusable_file_is_named_and_nothing_in_it_is(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SecretFileError, match=problem) as caught:
        read_secret(path, "password_file")
    assert str(path) in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
