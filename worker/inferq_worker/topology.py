"""Before the first delivery: are the queues what they should be? The worker declares none of them over AMQP.

For files named on the command line it may ask the management API to create them, as an operator would. Where
`broker.management_url` is set, the served models are compared with the broker, exactly, and consuming waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from inferq.management import Management, ManagementError
from inferq.provision import ensure_model, models_of
from inferq_schemas import DEFAULT_LANES, ModelTopology, Topology, diff, lane_queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferq_worker.models import ModelFile
    from inferq_worker.settings import WorkerSettings

_log = logging.getLogger(__name__)
_AGAIN_S = 2.0


class TopologyGate:
    """Opens when the topology of the served models stands."""

    def __init__(self, settings: WorkerSettings, files: Sequence[ModelFile]) -> None:
        self._models = [ModelTopology(file.name, file.lanes, file.fallback) for file in files]
        self._creates = settings.models.create_queues == "always" or (
            settings.models.create_queues == "auto" and bool(settings.models.files)
        )
        self._checks = settings.broker.management_url is not None
        self._broker = settings.broker
        self._problems: list[str] = []

    def problems(self) -> list[str]:
        """What is wrong with the topology, for `/readyz`."""
        return list(self._problems)

    async def open(self, stop: asyncio.Event) -> None:
        """Create what may be created, then wait until nothing differs, or until `stop`."""
        if self._creates:
            await self._create()
        while self._checks and not stop.is_set():
            problems = await asyncio.to_thread(self._differences)
            if problems != self._problems:
                self._problems = problems
                for problem in problems:
                    _log.warning("topology: %s", problem)
            if not problems:
                return
            try:
                async with asyncio.timeout(_AGAIN_S):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _create(self) -> None:
        for model in self._models:
            try:
                done = await asyncio.to_thread(ensure_model, Management.of(self._broker), model)
            except ManagementError as error:
                _log.warning("cannot create the queues of %s: %s; run `inferq topology add-model`", model.model, error)
                return
            for line in done:
                _log.info("topology: %s", line)

    def _differences(self) -> list[str]:
        try:
            actual = Management.of(self._broker).definitions()
        except ManagementError as error:
            return [str(error)]
        present = models_of(actual)
        absent = [model for model in self._models if model.model not in present]
        disagreed = [line for model in self._models for line in _disagreements(model, present.get(model.model))]
        if disagreed:
            return disagreed
        mine = {model.model: model for model in self._models if model.model in present}
        others = [f"inferq.{model}." for model in present if model not in mine]
        differences = diff(Topology(tuple((present | mine).values())), actual)
        return [_absent(model) for model in absent] + [
            f"{one.kind} {one.name}: {one.problem}"
            for one in differences
            if not any(other in one.name for other in others)
        ]


def _disagreements(mine: ModelTopology, broker: ModelTopology | None) -> list[str]:
    """Where worker and broker mean different models; either side can be the one that is wrong."""
    if broker is None or (mine.fallback, set(mine.lanes)) == (broker.fallback, set(broker.lanes)):
        return []
    lines = []
    if mine.fallback != broker.fallback:
        option = "" if mine.fallback else " --no-fallback"
        lines.append(
            f"model {mine.model}: the worker says fallback = {str(mine.fallback).lower()}, the broker "
            f"{str(broker.fallback).lower()}; set fallback = {str(broker.fallback).lower()} in its model.toml, or run "
            f"`inferq topology add-model {mine.model}{option}`"
        )
    if set(mine.lanes) != set(broker.lanes):
        ours, theirs = ", ".join(mine.lanes), ", ".join(broker.lanes)
        lines.append(
            f"model {mine.model}: the worker serves lanes {ours}, the broker has {theirs}; set lanes in model.toml, "
            f"or run `inferq topology add-model {mine.model} --lanes {','.join(mine.lanes)}`"
        )
    return lines


def _absent(model: ModelTopology) -> str:
    """One line for all its queues and bindings, with the only command that makes them: `apply` knows no such model."""
    options = "" if model.lanes == DEFAULT_LANES else f" --lanes {','.join(model.lanes)}"
    options += "" if model.fallback else " --no-fallback"
    mend = f"inferq topology add-model {model.model}{options}"
    return f"queue {lane_queue(model.model, model.lanes[0])} and all else of the model is missing; `{mend}` creates it"
