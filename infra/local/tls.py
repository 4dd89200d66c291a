"""TLS for a private pair: the files of a folder, what the servers are told of them, and how we ask whether they serve.

Such a pair speaks nothing else. It asks whoever connects for a certificate of the folder's own authority, and lets
nobody in without a login.
"""

import secrets
import ssl
from pathlib import Path


def context(folder: Path) -> ssl.SSLContext:
    """A context for a program of ours that talks to the pair as its administrator.

    It shows the servers' own certificate, and does not ask for their name: they are ours, on the loopback.

    Args:
        folder: with `ca.pem`, `server.pem` and `server.key`.
    """
    made = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    made.load_cert_chain(folder / "server.pem", folder / "server.key")
    made.check_hostname = False
    return made


def login() -> str:
    """A user and a password for the pair's administrator, as they stand in a url."""
    return f"admin:{secrets.token_hex(16)}"


def rabbitmq_settings(folder: Path, prefix: str) -> dict[str, str]:
    """Settings of a port of RabbitMQ; `prefix` says of which."""
    return {
        f"{prefix}.cacertfile": str(folder / "ca.pem"),
        f"{prefix}.certfile": str(folder / "server.pem"),
        f"{prefix}.keyfile": str(folder / "server.key"),
        f"{prefix}.verify": "verify_peer",
        f"{prefix}.fail_if_no_peer_cert": "true",
        f"{prefix}.versions.1": "tlsv1.3",
        f"{prefix}.versions.2": "tlsv1.2",
    }


def redis_configuration(folder: Path, port: int, admin: str) -> str:
    """Lines of Redis's configuration.

    Args:
        folder: with the files.
        port: where TLS is spoken.
        admin: the administrator's login.
    """
    user, _, password = admin.partition(":")
    return f"""port 0
tls-port {port}
tls-ca-cert-file "{folder / "ca.pem"}"
tls-cert-file "{folder / "server.pem"}"
tls-key-file "{folder / "server.key"}"
tls-auth-clients yes
user default off resetkeys resetchannels -@all
user {user} on >{password} ~* &* +@all
"""
