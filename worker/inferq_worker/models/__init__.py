"""Which models there are, on disk: names, versions, and what their `model.toml` says. Never loads one."""

from inferq_worker.models.repository import ModelFile, RepositoryError, find_models

__all__ = ["ModelFile", "RepositoryError", "find_models"]
