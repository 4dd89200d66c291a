"""A private certificate authority for tests: keys and certificates by the `openssl` command, new for every run."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_CURVE = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, both PEM."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates of its own.

    Args:
        folder: where its files go; `ca.pem` is what others trust.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._key = folder / "ca.key"
        folder.mkdir(parents=True, exist_ok=True)
        _openssl("genpkey", *_CURVE, "-out", self._key)
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        _openssl(
            "req", "-x509", "-new", "-key", self._key, "-subj", "/CN=inferq test authority", *usage, "-out", self.ca
        )

    def issue(self, name: str, *names: str, days: int = 2, password: str | None = None) -> Certificate:
        """Sign a certificate.

        Args:
            name: of its files and its subject.
            names: what it is for, such as `DNS:broker.test` or `IP:127.0.0.1`.
            days: from now; below 0 it has expired already.
            password: encrypts the key.
        """
        made = Certificate(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        encrypted = () if password is None else ("-aes256", "-pass", f"pass:{password}")
        _openssl("genpkey", *_CURVE, *encrypted, "-out", made.key)
        unlock = () if password is None else ("-passin", f"pass:{password}")
        _openssl("req", "-new", "-key", made.key, *unlock, "-subj", f"/CN={name}", "-out", request)
        extensions.write_text(f"subjectAltName={','.join(names) or f'DNS:{name}'}\n")
        signed = ("-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-days", str(days), "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, *signed, "-out", made.cert)
        return made


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
