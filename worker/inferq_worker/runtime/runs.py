"""The native runs that one call of a session takes: packs items, waits for the device, isolates culprits, hands out.

On a thread of its own, with that thread's buffers; the session above it belongs to the event loop.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from time import perf_counter

from inferq_worker.runtime.caps import RowCaps, Trial
from inferq_worker.runtime.collate import (
    Collator,
    Piece,
    check_all,
    inner_shapes,
    join,
    plan,
    row_sum,
    share_out,
)
from inferq_worker.runtime.finite import refuse_nonfinite
from inferq_worker.runtime.interface import (
    Engine,
    Feeds,
    NativeRun,
    RowError,
    RunFailed,
    RunReport,
    RunStopped,
    SessionInfo,
)
from inferq_worker.runtime.isolate import isolate
from inferq_worker.runtime.probe import row_count
from inferq_worker.runtime.turns import Turn, Turns


class Runs:
    """The native runs of one call, on one thread, with that thread's buffers.

    One run is packed before the turn comes. It is the first that runs, or never does: the buffers that hold it are not
    filled again before.
    """

    def __init__(self, engine: Engine, collator: Collator, info: SessionInfo, turns: Turns, caps: RowCaps) -> None:
        self._engine = engine
        self._collator = collator
        self.info = info
        self._turns = turns
        self._caps = caps
        self._run_s = 0.0
        self._padded_rows = 0
        self._finite = False

    def answer(self, feeds: Sequence[Feeds], turn: Turn | None = None, *, finite: bool = False) -> RunReport:
        """Check and pack, wait for the device, run and hand out, item by item.

        Args:
            feeds: one for each item.
            turn: of the device; None = one without a limit.
            finite: refuse answers that hold NaN or infinity.
        """
        turn = turn or Turn(self._turns)
        self._finite = finite
        checked = check_all(feeds, self.info)
        rows = {item: count for item, count in enumerate(checked) if isinstance(count, int)}
        runs = self._plan(feeds, rows)
        ahead = self._prepare(runs[0], feeds) if runs else None
        parts: dict[int, list[Feeds | RowError]] = {item: [] for item in rows}
        with turn.taken() as unwanted:
            if unwanted:
                rows = {item: count for item, count in rows.items() if item not in unwanted}
                runs, ahead = self._plan(feeds, rows), None
            for pieces in runs:
                for piece, answer in zip(pieces, self._run(pieces, feeds, turn, ahead), strict=True):
                    parts[piece.item].append(answer)
                ahead = None
        answered = (_whole(parts[item]) if isinstance(count, int) else count for item, count in enumerate(checked))
        return RunReport(
            tuple(answered), self._run_s, sum(rows.values()), self._padded_rows, timed_out=turn.was_stopped
        )

    def _plan(self, feeds: Sequence[Feeds], rows: Mapping[int, int]) -> list[tuple[Piece, ...]]:
        return plan(feeds, rows, self.info, self._caps.limit) if rows else []

    def _run(
        self, pieces: Sequence[Piece], feeds: Sequence[Feeds], turn: Turn, ahead: NativeRun | RunFailed | None
    ) -> list[Feeds | RowError]:
        """Answers of one packed run, its culprits isolated, in smaller runs where it finds no memory."""
        shape = inner_shapes(feeds[pieces[0].item], self.info)
        # Asked again: the run before this one may have learned that what was packed beside it is too large.
        trial = Trial(self._caps.limit(shape))

        try:
            answers = isolate(pieces, partial(self._divide, feeds=feeds, turn=turn, trial=trial, ahead=(pieces, ahead)))
        except RunStopped:
            return [RowError("inference_timeout", f"the run was stopped at its limit of {turn.limit_s:g} s")] * len(
                pieces
            )
        self._learn(shape, trial, answers)
        return answers

    def _divide(
        self,
        pieces: Sequence[Piece],
        *,
        feeds: Sequence[Feeds],
        turn: Turn,
        trial: Trial,
        ahead: tuple[Sequence[Piece], NativeRun | RunFailed | None],
    ) -> list[Feeds | RowError]:
        """One attempt, and where a single item finds no memory, one with each half of its rows.

        Not a function within `_run` that calls itself: such a one is a cycle, and would hold the whole batch with its
        message bodies until the garbage collector comes by.
        """
        packed, native = ahead
        try:
            return self._attempt(pieces, feeds, turn, trial, native if pieces is packed else None)
        except RunFailed as error:
            if error.code != "out_of_memory" or len(pieces) > 1 or not self._divisible(pieces):
                raise
        halves = partial(self._divide, feeds=feeds, turn=turn, trial=trial, ahead=ahead)
        return [_whole(isolate(_halves(pieces[0]), halves))]

    def _divisible(self, pieces: Sequence[Piece]) -> bool:
        return self.info.batchable and (len(pieces) > 1 or pieces[0].rows > 1)

    def _attempt(
        self,
        pieces: Sequence[Piece],
        feeds: Sequence[Feeds],
        turn: Turn,
        trial: Trial,
        ahead: NativeRun | RunFailed | None,
    ) -> list[Feeds | RowError]:
        """One native run of jobs, and what it says about memory."""
        computed = self.info.padded(row_sum(pieces))
        if self._divisible(pieces):
            trial.check(computed)
        try:
            outputs = self._go(pieces, ahead or self._prepare(pieces, feeds), turn)
        except RunFailed as error:
            if error.code == "out_of_memory":
                trial.overflowed(computed)
            raise
        trial.fitted(computed)
        answers = share_out(outputs, pieces, self.info)
        return list(refuse_nonfinite(outputs, answers, self.info.outputs) if self._finite else answers)

    def _learn(self, shape: Hashable, trial: Trial, answers: Sequence[Feeds | RowError]) -> None:
        """A size is to blame only if all rows found memory in smaller ones: else it may be the data of one of them."""
        if self.info.fixed_rows is not None or not self.info.batchable:
            return
        if any(isinstance(answer, RowError) and answer.code == "out_of_memory" for answer in answers):
            return
        if trial.failed:
            self._caps.overflowed(shape, failed=trial.failed, fits=trial.fits)
        elif trial.fits:
            self._caps.fitted(shape, trial.fits)

    def _prepare(self, pieces: Sequence[Piece], feeds: Sequence[Feeds]) -> NativeRun | RunFailed:
        """Gather the rows and hand them to the engine; a failure is raised when its turn has come."""
        try:
            return self._engine.prepare(self._collator.gather(pieces, feeds))
        except RunFailed as error:
            return error

    def _go(self, pieces: Sequence[Piece], ready: NativeRun | RunFailed, turn: Turn) -> Feeds:
        if isinstance(ready, RunFailed):
            raise ready
        rows = row_sum(pieces)
        self._padded_rows += self.info.padded(rows) - rows
        started = perf_counter()
        try:
            return turn.run(ready)
        finally:
            self._run_s += perf_counter() - started

    def run_once(self, feeds: Feeds) -> Feeds:
        """One native run of one item, with its failure raised: what the probe needs."""
        pieces = [Piece(0, 0, row_count(feeds, self.info.inputs))]
        turn = Turn(self._turns)
        with turn.taken():
            outputs = self._go(pieces, self._prepare(pieces, [feeds]), turn)
        return share_out(outputs, pieces, self.info)[0]

    def steady_run_s(self, feeds: Sequence[Feeds]) -> float | RowError:
        """Seconds of the second of two equal runs, or the first failure."""
        for _ in range(2):
            report = self.answer(feeds)
            for answer in report.answers:
                if isinstance(answer, RowError):
                    return answer
            elapsed_s, self._run_s = report.run_s, 0.0
        return elapsed_s


def _halves(piece: Piece) -> tuple[Piece, Piece]:
    middle = piece.start + piece.rows // 2
    return Piece(piece.item, piece.start, middle), Piece(piece.item, middle, piece.stop)


def _whole(parts: Sequence[Feeds | RowError]) -> Feeds | RowError:
    """The answer to one item; without any part of it nobody wanted it any more."""
    if not parts:
        return RowError("cancelled", "nobody waited for it any more when its run began")
    answers: list[Feeds] = []
    for part in parts:
        if isinstance(part, RowError):
            return part
        answers.append(part)
    return join(answers)
