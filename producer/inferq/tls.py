"""TLS to RabbitMQ, its management API and Redis: one verifying context for all three, and what their failures mean.

Verification cannot be turned off: a private authority is named with `ca_file`, another name with `server_name`. Files
are read when a context is made, so a renewed certificate is used from the next connection on.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from inferq.credentials import SecretFileError, read_secret

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferq.settings import ServerSection

__all__ = ["TlsContexts", "TlsFileError", "tls_context", "tls_hint", "tls_problem", "uses_tls"]

# Codes of OpenSSL, x509_vfy.h (X509_V_ERR_*).
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_UNKNOWN_AUTHORITY: Final = frozenset({2, 18, 19, 20, 21, 24, 26, 27, 79})
_OTHER_NAME: Final = frozenset({62, 64})
_WITHOUT_TLS: Final = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
_REFUSED_US: Final = ("CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE", "ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE")
_RENEW_OURS: Final = ("ALERT_CERTIFICATE_EXPIRED", "ALERT_CERTIFICATE_REVOKED")
_MOST_CAUSES: Final = 8


class TlsFileError(OSError):
    """A certificate, key or list of authorities cannot be used; the message names its knob and file."""


class _NamedContext(ssl.SSLContext):
    """Lets the settings say which name the certificate must have, whoever connects: asyncio, uvloop or http.client."""

    server_name: str | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 - the standard library's signature
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return super().wrap_bio(incoming, outgoing, server_side, self.server_name or server_hostname, session)

    def wrap_socket(self, *args: Any, server_hostname: str | bytes | None = None, **kwargs: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*args, server_hostname=self.server_name or server_hostname, **kwargs)  # type: ignore[misc]  # nobody passes it by position


def uses_tls(server: ServerSection) -> bool:
    """Whether the url asks for TLS."""
    return urlsplit(server.url.get_secret_value()).scheme in {"amqps", "rediss"}


def tls_context(server: ServerSection) -> ssl.SSLContext:
    """A context that verifies chain and name, with TLS 1.2 or newer, and our certificate where one is set.

    Raises:
        TlsFileError: a file of the settings cannot be used.
    """
    context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.server_name = server.server_name
    if server.ca_file is None:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(cafile=server.ca_file)
        except OSError as error:  # ssl.SSLError is one
            raise TlsFileError(f"ca_file {server.ca_file} {_file_problem(error, 'a PEM certificate')}") from None
    if server.cert_file is not None and server.key_file is not None:
        _load_own(context, server, server.cert_file, server.key_file)
    return context


def _load_own(context: ssl.SSLContext, server: ServerSection, cert_file: Path, key_file: Path) -> None:
    password_file = server.key_password_file
    # Without a password OpenSSL would ask for one on the terminal.
    password = "" if password_file is None else read_secret(password_file, "key_password_file")
    try:
        context.load_cert_chain(cert_file, key_file, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsFileError(f"key_file {key_file} is not the key of cert_file {cert_file}") from None
        mend = (
            "an encrypted key needs key_password_file"
            if password_file is None
            else f"it has another password than in key_password_file {password_file}"
        )
        raise TlsFileError(f"cert_file {cert_file} and key_file {key_file} cannot be used: no PEM, or {mend}") from None
    except OSError as error:
        wrong = next((path for path in (cert_file, key_file) if not path.is_file()), key_file)
        raise TlsFileError(f"{wrong} (cert_file, key_file) {_file_problem(error, 'PEM')}") from None


def _file_problem(error: OSError, wanted: str) -> str:
    return f"does not hold {wanted}" if isinstance(error, ssl.SSLError) else f"cannot be read: {error.strerror}"


class TlsContexts:
    """Makes contexts for a server, a new one whenever one of the files has changed.

    A pool opens many connections, and reading the system's authorities takes some milliseconds each time.
    """

    def __init__(self, server: ServerSection) -> None:
        self._server = server
        self._made: tuple[object, ssl.SSLContext] | None = None

    def get(self) -> ssl.SSLContext:
        """The context for a connection that is opened now; raises as `tls_context`."""
        state = [_state(path) for path in self._files()]
        if self._made is None or self._made[0] != state:
            self._made = (state, tls_context(self._server))
        return self._made[1]

    def _files(self) -> Iterator[Path | None]:
        server = self._server
        yield from (server.ca_file, server.cert_file, server.key_file, server.key_password_file)


def _state(path: Path | None) -> object:
    try:
        status = None if path is None else path.stat()
    except OSError:
        return "missing"
    return status and (status.st_ino, status.st_mtime_ns, status.st_size)


def tls_problem(error: BaseException, server: ServerSection, section: str) -> str | None:
    """What a person must mend if TLS is why a connection failed; None for all other errors.

    Args:
        error: raised by connecting; its causes are looked at as well.
        server: where it was going.
        section: of the settings, `broker` or `redis`.
    """
    parts = urlsplit(server.url.get_secret_value())
    place = f"the certificate of {parts.hostname}:{parts.port or '(default port)'}"
    for one in _causes(error):
        if isinstance(one, TlsFileError | SecretFileError):
            return f"{section}.{one}"
        if isinstance(one, ssl.SSLCertVerificationError):
            return _unverified(one, place, section)
        if isinstance(one, ssl.SSLError):
            return _failed(one, server, section)
    return None


def tls_hint(error: BaseException, server: ServerSection, section: str) -> str:
    """What to look at when the first connection of all is cut off or never answered, begun with "; ", or nothing.

    A server that hears TLS where it expects none, or the reverse, often just hangs up or waits for more.
    """
    cut_off = (ConnectionResetError, BrokenPipeError, EOFError, TimeoutError)
    if not any(isinstance(one, cut_off) or "imeout" in type(one).__name__ for one in _causes(error)):
        return ""
    scheme = urlsplit(server.url.get_secret_value()).scheme
    if not uses_tls(server):
        return "" if scheme == "unix" else f"; if the port of {section}.url speaks TLS, write {scheme}s://"
    hint = f"; if the port of {section}.url does not speak TLS, name another"
    if server.cert_file is None:
        return hint + f"; if the server asks for a client certificate, set {section}.cert_file and {section}.key_file"
    # It may have said so, in an alert that was lost with the connection.
    return hint + f"; if the server does not accept our certificate, check {section}.cert_file and who signed it"


def _unverified(error: ssl.SSLCertVerificationError, place: str, section: str) -> str:
    code = error.verify_code
    if code in {_EXPIRED, _NOT_YET_VALID}:
        when = "has expired" if code == _EXPIRED else "is not valid yet"
        return f"{place} {when}: renew it on the server, and check the clocks"
    if code in _UNKNOWN_AUTHORITY:
        return f"{place} is signed by an authority that is not trusted: name the authority's file in {section}.ca_file"
    if code in _OTHER_NAME:
        return (
            f"{place} is for another host ({error.verify_message}): use the name that it has in {section}.url, "
            f"or set {section}.server_name"
        )
    return f"{place} cannot be trusted: {error.verify_message}"


def _failed(error: ssl.SSLError, server: ServerSection, section: str) -> str | None:
    reason = error.reason or ""
    if any(word in reason for word in _WITHOUT_TLS):
        scheme = urlsplit(server.url.get_secret_value()).scheme
        return (
            f"the port of {section}.url does not speak TLS: name the server's TLS port, or write {scheme[:-1]}:// if "
            "the connection need not be encrypted"
        )
    if any(word in reason for word in _RENEW_OURS):
        return f"the server says that our certificate has expired or was revoked: renew {section}.cert_file"
    if any(word in reason for word in _REFUSED_US):
        if server.cert_file is None:
            return f"the server asks for a client certificate: set {section}.cert_file and {section}.key_file"
        return f"the server does not accept our certificate ({reason}): check {section}.cert_file and who signed it"
    return f"TLS failed: {reason.replace('_', ' ').lower() or 'no reason given'}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it came from; libraries wrap, sometimes without saying so."""
    one: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if one is None:
            return
        yield one
        one = one.__cause__ or one.__context__
