"""Which jobs run together, and when. Pure: no socket, no session, and no clock of its own."""

from inferq_worker.scheduling.batch import Batch, Entry, Policy, Poll
from inferq_worker.scheduling.batcher import Batcher
from inferq_worker.scheduling.clock import Clock
from inferq_worker.scheduling.earliest_deadline import EarliestDeadline
from inferq_worker.scheduling.latency import LatencyTable, RunningP95
from inferq_worker.scheduling.size_or_timeout import SizeOrTimeout

__all__ = [
    "Batch",
    "Batcher",
    "Clock",
    "EarliestDeadline",
    "Entry",
    "LatencyTable",
    "Policy",
    "Poll",
    "RunningP95",
    "SizeOrTimeout",
]
