"""Claim checks: large inputs that lie in Redis instead of the message. Only the job's own keys are ever read."""

from __future__ import annotations

import asyncio
from math import prod
from typing import TYPE_CHECKING

from inferq.keys import is_at
from inferq_schemas import ContractError, Tensor
from inferq_schemas.tensor import DTYPES
from inferq_worker.errors import StoreUnavailable, WorkError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferq_schemas import Job
    from inferq_worker.held import Held
    from inferq_worker.store import Store
    from inferq_worker.work import Delivery, Request

_RETRY_S = 0.5
_FETCHES = 4
"""At a time. More would not be faster, and would keep Redis connections from the answers."""


class Payloads:
    """Resolves the references of a job's inputs.

    Args:
        store: where the payloads lie.
        held: counts what was fetched, and holds fetches back while too much is in hand.
        max_bytes: most bytes of all resolved inputs of a job together.
    """

    def __init__(self, store: Store, held: Held, *, max_bytes: int) -> None:
        self._store = store
        self._held = held
        self._fetches = asyncio.Semaphore(_FETCHES)
        self._max_bytes = max_bytes

    def needed(self, job: Job) -> bool:
        """Whether any input is a reference."""
        return any(tensor.ref is not None for tensor in job.inputs.values())

    async def resolve(self, job: Job, request: Request) -> Mapping[str, Tensor]:
        """The job's inputs with every reference replaced by its data. Waits while Redis is away.

        Raises:
            WorkError: `invalid_input` for a reference that is not the job's own, has expired, or has another size
                than its shape says; `too_large` above the limit.
        """
        names = [name for name, tensor in job.inputs.items() if tensor.ref is not None]
        if not names:
            return job.inputs
        refs = [str(job.inputs[name].ref) for name in names]
        for name, ref in zip(names, refs, strict=True):
            if not is_at(ref, own := self._store.input_ref(job.id, name)):
                raise WorkError("invalid_input", f"inputs.{name}.ref must be {own!r}, the key of this very input")
        payload_bytes = sum(_declared_bytes(name, job.inputs[name]) for name in names)
        if payload_bytes > self._max_bytes:
            message = f"referenced inputs are {payload_bytes} bytes together, at most {self._max_bytes}"
            raise WorkError("too_large", f"{message} (limits.payload_bytes)")
        await self._held.reserve(request, payload_bytes)
        raw = await self._fetch(refs, request.delivery)
        found = dict(zip(names, raw, strict=True))
        return {name: _resolved(name, tensor, found) for name, tensor in job.inputs.items()}

    async def _fetch(self, refs: list[str], delivery: Delivery) -> list[bytes | None]:
        while True:
            try:
                async with self._fetches:
                    return await self._store.payloads(refs)
            except StoreUnavailable as error:
                if delivery.stale:
                    raise WorkError("internal", "redis is away and the delivery was taken back", keep=False) from error
                await asyncio.sleep(_RETRY_S)


def _declared_bytes(name: str, tensor: Tensor) -> int:
    """What the payload must be, told by its type and shape alone: nothing is fetched to find out."""
    item_bytes = DTYPES[tensor.dtype].item_bytes
    if not item_bytes:
        raise WorkError("invalid_input", f"inputs.{name}.ref: texts travel in the message, not by reference")
    return prod(tensor.shape) * item_bytes


def _resolved(name: str, tensor: Tensor, found: Mapping[str, bytes | None]) -> Tensor:
    if name not in found:
        return tensor
    data = found[name]
    if data is None:
        raise WorkError("invalid_input", f"inputs.{name}.ref: nothing is stored there (any more); send the job again")
    try:
        return Tensor(dtype=tensor.dtype, shape=tensor.shape, data=data)
    except (ContractError, ValueError) as error:
        message = f"inputs.{name}.ref holds {len(data)} bytes, which is not {tensor.dtype} {list(tensor.shape)}"
        raise WorkError("invalid_input", message) from error
