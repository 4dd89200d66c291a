"""All knobs of the client, with bounds and units. The worker's settings take the shared sections from here.

A settings object is frozen and does no I/O; `load_settings` reads the sources and builds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from inferq.configuration import CLIENT_SECTIONS, WORKER_SECTIONS, ConfigurationError, load_settings
from inferq.knobs import effective, settings_table
from inferq_schemas import DEFAULT_LANES, FALLBACK_LANE, LANE_PATTERN, MODEL_PATTERN

__all__ = [
    "CLIENT_SECTIONS",
    "WORKER_SECTIONS",
    "BrokerSettings",
    "ClientOptions",
    "ClientSettings",
    "ConfigurationError",
    "LaneName",
    "ModelName",
    "ModelTopologySettings",
    "RedisSettings",
    "Section",
    "ServerSection",
    "Settings",
    "TopologySettings",
    "effective",
    "load_settings",
    "settings_table",
]

ModelName = Annotated[str, Field(pattern=MODEL_PATTERN)]
LaneName = Annotated[str, Field(pattern=LANE_PATTERN)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, no infinities, no values in error texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class Settings(BaseSettings):
    """Base of the settings of a program: takes values from its constructor only, so that building it does no I/O."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only the constructor: `load_settings` has read and checked everything else."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)


def _checked_url(url: SecretStr, schemes: tuple[str, ...]) -> SecretStr:
    """Refuse what will surely not connect. The message never repeats the URL: it holds a password."""
    expected = " or ".join(f"{scheme}://" for scheme in schemes)
    try:
        parts = urlsplit(url.get_secret_value())
        reachable = bool(parts.hostname) or parts.scheme == "unix"
        _ = parts.port
    except ValueError:
        # `from None`: the cause would repeat the text after the colon, which may be half a password.
        raise ValueError("is no valid URL; percent-encode special characters in its user and password") from None
    if parts.scheme not in schemes:
        raise ValueError(f"must start with {expected}")
    if not reachable:
        raise ValueError(f"names no host; write it as {schemes[0]}://user:password@host:port/...")
    return url


def _amqp_url(url: SecretStr) -> SecretStr:
    return _without_options(_checked_url(url, ("amqp", "amqps")))


def _http_url(url: SecretStr) -> SecretStr:
    return _checked_url(url, ("http", "https"))


def _redis_url(url: SecretStr) -> SecretStr:
    return _without_options(_checked_url(url, ("redis", "rediss", "unix")), allowed=("db",))


_KNOB_OF_OPTION: Final = {
    "socket_timeout": "socket_timeout_s",
    "socket_connect_timeout": "connect_timeout_s",
    "timeout": "connect_timeout_s",
    "max_connections": "max_connections",
    "heartbeat": "heartbeat_s",
    "ssl_ca_certs": "ca_file",
    "cafile": "ca_file",
    "ssl_certfile": "cert_file",
    "certfile": "cert_file",
    "ssl_keyfile": "key_file",
    "keyfile": "key_file",
    "password": "password_file",
    "username": "user_file",
}


def _without_options(url: SecretStr, *, allowed: tuple[str, ...] = ()) -> SecretStr:
    """Refuse options after the `?`: to the libraries they outrank every knob, and some turn verification off.

    Named, never with their values: one may be a password.
    """
    options = parse_qs(urlsplit(url.get_secret_value()).query, keep_blank_values=True)
    refused = sorted(set(options) - set(allowed))
    if refused:
        named = [f"{name} (use {_KNOB_OF_OPTION[name]})" if name in _KNOB_OF_OPTION else name for name in refused]
        raise ValueError(
            f"has options that would override the other knobs of its section: {', '.join(named)[:300]}; take them out"
        )
    if not all(value.isdecimal() for values in options.values() for value in values):
        raise ValueError("its option db must be a number")
    return url


AmqpUrl = Annotated[SecretStr, AfterValidator(_amqp_url)]
HttpUrl = Annotated[SecretStr, AfterValidator(_http_url)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis_url)]


class ServerSection(Section):
    """A server that is logged in to, perhaps over TLS. Files are named here and read at every connect, not before."""

    url: SecretStr
    user_file: Path | None = Field(
        default=None, description="File with the user's name, instead of the one in `url`; read again at every connect."
    )
    password_file: Path | None = Field(
        default=None, description="File with the password, instead of the one in `url`; read again at every connect."
    )
    ca_file: Path | None = Field(
        default=None,
        description="PEM file of the authorities to trust instead of the system's; only with a TLS url.",
    )
    cert_file: Path | None = Field(
        default=None, description="PEM file of this client's certificate, for mutual TLS; read again at every connect."
    )
    key_file: Path | None = Field(default=None, description="PEM file of the private key that belongs to `cert_file`.")
    key_password_file: Path | None = Field(
        default=None, description="File with the password of an encrypted `key_file`."
    )
    server_name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9.:_-]{1,253}$",
        description="Name that the server's certificate must have, where it is not the host of `url`.",
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        problems = []
        names = ("ca_file", "cert_file", "key_file", "key_password_file", "server_name")
        given = [name for name in names if getattr(self, name) is not None]
        scheme = urlsplit(self.url.get_secret_value()).scheme
        if given and scheme not in {"amqps", "rediss"}:
            secure = "rediss" if scheme == "unix" else f"{scheme}s"
            problems.append(f"{', '.join(given)} set, but {scheme}:// is not encrypted: use {secure}:// or drop them")
        if (self.cert_file is None) != (self.key_file is None):
            problems.append("cert_file and key_file belong together: set both or neither")
        if self.key_password_file is not None and self.key_file is None:
            problems.append("key_password_file is of no use without key_file: set both, or drop it")
        if problems:
            raise ValueError("\n".join(problems))
        return self


class BrokerSettings(ServerSection):
    """RabbitMQ: where it is and how long to wait for it."""

    url: AmqpUrl = Field(
        default=SecretStr("amqp://guest:guest@127.0.0.1:5672/"),
        description="AMQP address with user, password and vhost; `amqps://` for TLS.",
    )
    management_url: HttpUrl | None = Field(
        default=None,
        description="Management API, for `inferq topology` and exact checks at start. Without it the commands ask the "
        "host of `url` with the same user: on port 15672, or over TLS on port 15671 where `url` is `amqps://`.",
    )
    reply_exchange: Literal["", "inferq.replies"] = Field(
        default="",
        description="How answers travel to reply queues: empty = through the default exchange, which any AMQP client's "
        "request-reply works with; inferq.replies = hardened: clients bind their reply queues there, and workers need "
        "no right to write to every queue. The same for clients and workers.",
    )
    heartbeat_s: int = Field(
        default=20, ge=1, le=600, description="Seconds between heartbeats; two missed ones end it."
    )
    connect_timeout_s: float = Field(default=10.0, gt=0, le=300, description="Seconds for one attempt to connect.")
    publish_timeout_s: float = Field(
        default=10.0, gt=0, le=300, description="Seconds to wait for a confirm; after that the publish is unknown."
    )
    reconnect_min_s: float = Field(default=0.2, gt=0, le=60, description="Seconds before the first reconnect.")
    reconnect_max_s: float = Field(default=10.0, gt=0, le=600, description="Longest wait between reconnects, seconds.")

    @model_validator(mode="after")
    def _backoff_grows(self) -> Self:
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError("reconnect_min_s is above reconnect_max_s: lower the first or raise the second")
        return self


class RedisSettings(ServerSection):
    """Redis: outcomes, large payloads, cancellations."""

    url: RedisUrl = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"),
        description="Redis address with user, password and database; `rediss://` for TLS.",
    )
    prefix: str = Field(
        default="inferq",
        pattern=r"^[A-Za-z0-9_.:-]{1,64}$",
        description="First part of every key; one per tenant or environment.",
    )
    socket_timeout_s: float = Field(default=2.0, gt=0, le=60, description="Seconds for one command.")
    connect_timeout_s: float = Field(default=2.0, gt=0, le=60, description="Seconds for one attempt to connect.")
    max_connections: int = Field(
        default=8, ge=1, le=10_000, description="Most connections in the pool; a worker opens all of them at its start."
    )
    result_ttl_s: int = Field(
        default=3600, ge=1, le=7 * 86_400, description="Seconds an outcome is kept; also how long ids deduplicate."
    )
    replied_ttl_s: int = Field(
        default=300, ge=1, le=7 * 86_400, description="Seconds an outcome is kept once its reply was confirmed."
    )

    @model_validator(mode="after")
    def _replied_is_shorter(self) -> Self:
        if self.replied_ttl_s > self.result_ttl_s:
            raise ValueError("replied_ttl_s is above result_ttl_s: lower the first or raise the second")
        return self


class ClientOptions(Section):
    """How jobs are sent when the caller does not say otherwise."""

    deadline_s: float = Field(
        default=30.0, gt=0, le=86_400, description="Deadline of a job in the interactive lane, seconds from sending."
    )
    cpu_reserve_ratio: float = Field(
        default=0.3,
        ge=0,
        lt=1,
        description="Share of the time left that is kept for the CPU fallback: the broker moves a job that early.",
    )
    bundle_jobs: int = Field(default=64, ge=1, le=256, description="Jobs in one message of the bulk lane.")
    window_jobs: int = Field(default=1024, ge=1, le=1_000_000, description="Most bulk jobs under way at a time.")

    @model_validator(mode="after")
    def _a_bundle_fits_the_window(self) -> Self:
        if self.bundle_jobs > self.window_jobs:
            raise ValueError("bundle_jobs is above window_jobs, so no bundle could leave: lower the first")
        return self


def _distinct_job_lanes(lanes: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(lanes)) != len(lanes):
        raise ValueError("names a lane twice")
    if FALLBACK_LANE in lanes:
        raise ValueError(f"{FALLBACK_LANE!r} is the CPU's own queue; leave it out and set `fallback`")
    return lanes


class ModelTopologySettings(Section):
    """The queues of one model."""

    lanes: Annotated[tuple[LaneName, ...], AfterValidator(_distinct_job_lanes)] = Field(
        default=DEFAULT_LANES, min_length=1, description="Lanes of the model, the most urgent first."
    )
    fallback: bool = Field(
        default=True, description="Whether CPU workers serve this model; if not, late jobs are dead-lettered."
    )


class TopologySettings(Section):
    """Which models have queues."""

    models: dict[ModelName, ModelTopologySettings] = Field(
        default_factory=dict, description="Models by name, for `inferq topology` and the checks of workers."
    )


class ClientSettings(Settings):
    """Everything a client reads; the worker's sections of the same inferq.toml are skipped."""

    broker: BrokerSettings = BrokerSettings()
    redis: RedisSettings = RedisSettings()
    client: ClientOptions = ClientOptions()
    topology: TopologySettings = TopologySettings()
