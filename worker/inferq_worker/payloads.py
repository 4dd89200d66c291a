"""Claim checks: large inputs that lie in Redis instead of the message. Only the job's own keys are ever read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from inferq_schemas import ContractError, Tensor
from inferq_worker.errors import StoreUnavailable, WorkError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferq_schemas import Job
    from inferq_worker.store import Store
    from inferq_worker.work import Delivery

_RETRY_S = 0.5


class Payloads:
    """Resolves the references of a job's inputs.

    Args:
        store: where the payloads lie.
        max_bytes: most bytes of all resolved inputs of a job together.
    """

    def __init__(self, store: Store, *, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes

    def needed(self, job: Job) -> bool:
        """Whether any input is a reference."""
        return any(tensor.ref is not None for tensor in job.inputs.values())

    async def resolve(self, job: Job, delivery: Delivery) -> Mapping[str, Tensor]:
        """The job's inputs with every reference replaced by its data. Waits while Redis is away.

        Raises:
            WorkError: `invalid_input` for a reference that is not the job's own, has expired, or has another size
                than its shape says; `too_large` above the limit.
        """
        names = [name for name, tensor in job.inputs.items() if tensor.ref is not None]
        if not names:
            return job.inputs
        for name in names:
            if job.inputs[name].ref != (own := self._store.input_ref(job.id, name)):
                raise WorkError("invalid_input", f"inputs.{name}.ref must be {own!r}, the key of this very input")
        raw = await self._fetch(job.id, names, delivery)
        if sum(len(data) for data in raw if data is not None) > self._max_bytes:
            raise WorkError("too_large", f"referenced inputs are above {self._max_bytes} bytes together")
        found = dict(zip(names, raw, strict=True))
        return {name: _resolved(name, tensor, found) for name, tensor in job.inputs.items()}

    async def _fetch(self, job_id: str, names: list[str], delivery: Delivery) -> list[bytes | None]:
        while True:
            try:
                return await self._store.payloads(job_id, names)
            except StoreUnavailable as error:
                if delivery.stale:
                    raise WorkError("internal", "redis is away and the delivery was taken back", keep=False) from error
                await asyncio.sleep(_RETRY_S)


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
