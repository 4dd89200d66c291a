"""Reads ONNX Runtime's profile, a Chrome trace, and sums it up by operator and by node. Pure but for reading a file."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

_RUN = "model_run"
_GRAPH = "SequentialExecutor::Execute"
_KERNEL = "_kernel_time"
_US = 1e-6


class NotAProfile(Exception):  # noqa: N818 - says what was found
    """The file is not what this ONNX Runtime is known to write."""


@dataclass(frozen=True, slots=True)
class Span:
    """When something ran: microseconds since the session was created, and the thread."""

    thread: int
    start_us: int
    took_us: int

    @property
    def end_us(self) -> int:
        """When it ended."""
        return self.start_us + self.took_us


@dataclass(frozen=True, slots=True)
class Kernel:
    """One execution of one node.

    Attributes:
        own_us: without the nodes that ran inside of it, as those of a Loop do.
        shapes: of its outputs, such as `float [8, 64]`.
    """

    node: str
    operator: str
    provider: str
    span: Span
    own_us: int
    shapes: str


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one operator, or of one node, over all runs.

    Attributes:
        name: of the operator, or of the node.
        operator: the operator; for an operator, its own name.
        provider: the execution provider of its kernels.
        nodes: how many nodes of the graph it is.
        executions: how often one of them ran.
        own_s: seconds without what ran inside of it.
        share: of the time of all nodes; 0..1.
        shapes: of the outputs of its last execution; empty for an operator.
    """

    name: str
    operator: str
    provider: str
    nodes: int
    executions: int
    own_s: float
    share: float
    shapes: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time went.

    Attributes:
        runs: how many runs are in it.
        run_s: seconds of these runs, all together.
        kernels_s: seconds of these in nodes; the rest is ONNX Runtime's own.
        operators: the dearest first.
        nodes: the dearest first.
    """

    runs: int
    run_s: float
    kernels_s: float
    operators: tuple[Cost, ...]
    nodes: tuple[Cost, ...]


def read_profile(path: Path, *, skip_runs: int) -> Profile:
    """Sum up the profile at `path`, without its first `skip_runs` runs.

    Raises:
        NotAProfile: it is not one, or has not that many runs.
    """
    try:
        events = json.loads(path.read_bytes())
        runs = sorted((event["ts"], event["dur"]) for event in events if event.get("name") == _RUN)
        kernels = list(_kernels(events))
        graphs = [_span(event) for event in events if event.get("name") == _GRAPH]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAProfile(f"{path} is not a profile as ONNX Runtime writes it: {error!r}") from error
    if len(runs) <= skip_runs:
        raise NotAProfile(f"{path} holds {len(runs)} runs, and {skip_runs} of them were to be left out")
    counted = [kernel for kernel in own_times(kernels, graphs) if kernel.span.start_us >= runs[skip_runs][0]]
    kept = runs[skip_runs:]
    return Profile(
        runs=len(kept),
        run_s=sum(took for _, took in kept) * _US,
        kernels_s=sum(kernel.own_us for kernel in counted) * _US,
        operators=_costs(counted, by_node=False),
        nodes=_costs(counted, by_node=True),
    )


def _kernels(events: Iterable[Mapping[str, Any]]) -> Iterator[Kernel]:
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            args = event["args"]
            yield Kernel(
                node=event["name"].removesuffix(_KERNEL),
                operator=args["op_name"],
                provider=args.get("provider", ""),
                span=_span(event),
                own_us=event["dur"],
                shapes=_shapes(args.get("output_type_shape", ())),
            )


def _span(event: Mapping[str, Any]) -> Span:
    return Span(event["tid"], event["ts"], event["dur"])


def _shapes(outputs: Iterable[Mapping[str, Sequence[int]]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for output in outputs for dtype, shape in output.items())


def own_times(kernels: Iterable[Kernel], graphs: Iterable[Span]) -> list[Kernel]:
    """Take from each kernel the time of those inside of it, so that a subgraph is not counted twice.

    A kernel is inside of another one if the execution of a graph stands between them; times are whole microseconds, so
    overlap alone may only be rounding.

    Args:
        kernels: in any order.
        graphs: the executions of the main graph and of subgraphs.
    """
    found: list[Kernel] = []
    stacks: dict[int, list[_Open]] = defaultdict(list)
    for span, kernel in sorted([*((one.span, one) for one in kernels), *((one, None) for one in graphs)], key=_order):
        stack = stacks[span.thread]
        while stack and stack[-1].span.end_us < span.end_us:
            stack.pop()
        if kernel is None:
            outer = next((one.index for one in reversed(stack) if one.is_kernel), None)
            stack.append(_Open(span, outer, is_kernel=False))
            continue
        graph = next((one for one in reversed(stack) if not one.is_kernel), None)
        if graph is not None and graph.index is not None:
            outer_kernel = found[graph.index]
            found[graph.index] = replace(outer_kernel, own_us=max(0, outer_kernel.own_us - span.took_us))
        stack.append(_Open(span, len(found), is_kernel=True))
        found.append(kernel)
    return found


@dataclass(frozen=True, slots=True)
class _Open:
    """What has begun and not ended: a kernel, by its index, or a graph, by the index of the kernel that runs it."""

    span: Span
    index: int | None
    is_kernel: bool


def _order(pair: tuple[Span, Kernel | None]) -> tuple[int, int, bool]:
    span, kernel = pair
    return span.start_us, -span.took_us, kernel is not None


def _costs(kernels: Sequence[Kernel], *, by_node: bool) -> tuple[Cost, ...]:
    groups: dict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.node if by_node else kernel.operator, kernel.operator, kernel.provider].append(kernel)
    total_us = sum(kernel.own_us for kernel in kernels) or 1
    costs = [
        Cost(
            name=name,
            operator=operator,
            provider=provider,
            nodes=len({kernel.node for kernel in group}),
            executions=len(group),
            own_s=sum(kernel.own_us for kernel in group) * _US,
            share=sum(kernel.own_us for kernel in group) / total_us,
            shapes=group[-1].shapes if by_node else "",
        )
        for (name, operator, provider), group in groups.items()
    ]
    return tuple(sorted(costs, key=lambda cost: -cost.own_s))
