"""All knobs of the worker. Frozen, bounded, units in names; contradictions are start-up errors with the mend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from inferq.settings import ClientSettings, Section
from inferq_worker.runtime import BreakerSettings, RuntimeSettings

MIB = 2**20


class ModelsSettings(Section):
    """What is served."""

    dir: Path | None = Field(default=None, description="Repository: `<dir>/<name>/<version>/model.onnx`.")
    files: tuple[str, ...] = Field(default=(), description="Single files: `path.onnx` or `name=path.onnx`.")
    create_queues: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Create missing queues through the management API at start; auto = only for models.files.",
    )


class BatchingSettings(Section):
    """When a batch leaves, and with which jobs."""

    policy: Literal["earliest_deadline", "size_or_timeout"] = Field(
        default="earliest_deadline",
        description="earliest_deadline: deadline order, early drop, diversion to CPU workers; size_or_timeout: plain.",
    )

    max_rows: int = Field(default=32, ge=1, le=65_536, description="Largest batch, in rows.")
    max_bytes: int = Field(default=64 * MIB, ge=1, description="Largest batch, in bytes of input.")
    max_wait_s: float = Field(
        default=0.005, ge=0, le=60, description="Longest wait for company while a device is free, in seconds."
    )
    in_flight: int = Field(
        default=8, ge=2, le=64, description="Most batches at a time from composition to their last answer."
    )
    bulk_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Rows that bulk lanes get while interactive ones are overloaded, as a share.",
    )
    ageing_s: float = Field(
        default=60.0, gt=0, description="A job without deadline precedes jobs due later than this after its arrival."
    )


class LanesSettings(Section):
    """How much work is held in hand."""

    interactive_window: int = Field(
        default=256,
        ge=1,
        le=2000,
        description="Messages of an interactive lane in hand (prefetch) at first; two batches at least.",
    )
    bulk_window: int = Field(default=4, ge=1, le=2000, description="Messages of a bulk lane in hand at the start.")
    bulk_window_rows: int = Field(
        default=1024, ge=1, description="Rows that a bulk lane's window aims at once it has seen its messages."
    )
    max_held_bytes: int = Field(
        default=512 * MIB, ge=8 * MIB, description="Message bytes in hand above which bulk lanes pause until half."
    )
    dead_window: int = Field(default=64, ge=1, le=2000, description="Dead-lettered messages in hand at a time.")


class LimitsSettings(Section):
    """What one message may be."""

    body_bytes: int = Field(default=8 * MIB, ge=1024, le=16 * MIB, description="Largest message body.")
    bundle_jobs: int = Field(default=256, ge=1, le=256, description="Most jobs in a bundle.")
    claim_check_bytes: int = Field(
        default=256 * 1024, ge=1024, le=8 * MIB, description="Larger outputs travel through Redis as references."
    )
    rows: int = Field(
        default=65_536,
        ge=1,
        le=16 * MIB,
        description="Most rows of one job. Rows without elements cost no bytes, so no other limit bounds them.",
    )
    payload_bytes: int = Field(default=64 * MIB, ge=1024, description="Most bytes of a job's inputs that lie in Redis.")


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{pattern!r} is no regular expression ({error}); put a backslash before . ( ) [ ] * + ?"
        ) from None
    return pattern


class RepliesSettings(Section):
    """Where answers may go."""

    allow: tuple[Annotated[str, AfterValidator(_regular_expression)], ...] = Field(
        default=(r"amq\.rabbitmq\.reply-to\..+", r"amq\.gen-.+", r"reply\..+"),
        description="Regular expressions of queue names that `reply_to` may carry; never a queue of inferq.",
    )


class AdminSettings(Section):
    """The worker's HTTP port: /metrics /livez /readyz /startupz /status."""

    host: str = Field(default="127.0.0.1", description="Address it listens on.")
    port: int = Field(default=9180, ge=0, le=65_535, description="Port; 0 = any free one, which is logged.")
    stall_s: float = Field(
        default=90.0, gt=0, description="A run longer than this, or an event loop silent for 10 s, fails /livez."
    )


class LogSettings(Section):
    """What is logged, to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")
    format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto = console on a terminal, else JSON lines."
    )


class DrainSettings(Section):
    """The end of a worker."""

    limit_s: float = Field(
        default=60.0, gt=0, le=3600, description="Seconds from SIGTERM in which running batches may finish."
    )


class MemorySettings(Section):
    """Memory of the process, without pages of files, which the system can drop: when the worker leaves for it."""

    limit_bytes: int | None = Field(
        default=None,
        ge=64 * MIB,
        description="Over this the worker drains and ends with exit status 3, to be started again; with a container "
        "limit, the lower of the two counts.",
    )
    limit_share: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="The same as a share of the container's memory limit (cgroup), where there is one; 0 = do not look "
        "at it.",
    )
    sample_every_s: float = Field(default=1.0, ge=0.01, le=3600, description="Seconds between samples.")
    snapshot_dir: Path | None = Field(
        default=None,
        description="Folder for a heap snapshot before the worker leaves for memory. To find a leak, not for every "
        "day: tracing makes the worker's own part of the work several times slower.",
    )
    snapshots_kept: int = Field(default=3, ge=1, le=1000, description="Snapshots that stay in that folder.")
    snapshot_frames: int = Field(
        default=1, ge=1, le=50, description="Callers shown of each allocation; each costs as much again."
    )


class WorkerSettings(ClientSettings):
    """Everything a worker reads."""

    role: Literal["gpu", "cpu"] = Field(
        default="gpu", description="gpu: job lanes; cpu: the fallback queues, always on the CPU provider."
    )
    models: ModelsSettings = ModelsSettings()
    batching: BatchingSettings = BatchingSettings()
    lanes: LanesSettings = LanesSettings()
    limits: LimitsSettings = LimitsSettings()
    replies: RepliesSettings = RepliesSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    breaker: BreakerSettings = BreakerSettings()
    admin: AdminSettings = AdminSettings()
    log: LogSettings = LogSettings()
    drain: DrainSettings = DrainSettings()
    memory: MemorySettings = MemorySettings()

    @model_validator(mode="after")
    def _something_is_served(self) -> Self:
        if self.models.dir is None and not self.models.files:
            raise ValueError("no model to serve: give --model FILE.onnx, or models.dir")
        return self
