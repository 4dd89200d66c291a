"""A session of ONNX Runtime that counts what is bound to it and fetched from it."""

import contextlib
from collections import Counter
from typing import Any


class Watched:
    """A session that counts what is bound and fetched."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.counts: Counter[str] = Counter()
        self.graph_ids: list[str] = []

    def io_binding(self) -> Any:
        self.counts["bindings"] += 1
        return WatchedBinding(self._session.io_binding(), self.counts)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self.counts["runs"] += 1
        with contextlib.suppress(RuntimeError):  # there is none
            self.graph_ids.append(options.get_run_config_entry("gpu_graph_id"))
        self._session.run_with_iobinding(binding.real, options)


class WatchedBinding:
    def __init__(self, real: Any, counts: Counter[str]) -> None:
        self.real = real
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        self._counts[name] += 1
        return getattr(self.real, name)
