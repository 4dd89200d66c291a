"""The version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of `inferq` as installed, or `0+source` in a checkout that nobody installed."""
    try:
        return version("inferq")
    except PackageNotFoundError:
        return "0+source"
