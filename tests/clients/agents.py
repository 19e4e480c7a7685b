"""Agents as their users start them: the command, its settings, and the tool that their first request must call.

Each agent has a home folder of its own, no telemetry and no check for updates, by its documented settings. The proxy
that it is told to use for other hosts refuses and records them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.clients.forcing_proxy import ForcedCall
from tests.support.server import REPOSITORY
from tests.support.terse_llama import MAX_MODEL_LEN

FOLDER = Path(os.environ.get("TANDEM_AGENTS", REPOSITORY / ".venv-agents"))
NODE = FOLDER / "node" / "node_modules"
NOTE, SECRET = "note.txt", "The heron is patient."
QUESTION = f"Read {NOTE} and say what is in it."
AGENT_S = 240.0

Json = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where an agent runs: its home folder, its work folder, and the server that it is told to use."""

    home: Path
    work: Path
    url: str
    model: str
    key: str

    @property
    def note(self) -> str:
        """The file to read, by its whole path."""
        return str(self.work / NOTE)

    def write(self, path: str, content: Json | str) -> Path:
        """A file of settings below the home folder."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
        return file


@dataclass(frozen=True)
class Agent:
    """`settings` writes files and returns variables of the environment; `call` is None for one without tools."""

    name: str
    package: str
    api: str
    command: Callable[[Place], list[str]]
    settings: Callable[[Place], Mapping[str, str]]
    tool: str = ""  # what the first request must call; "" = the agent has no tools
    input: Callable[[Place], Json] | None = None
    venv: str = ""  # "" = a package of npm
    asks_elsewhere: str = ""  # what it still asks other hosts for, without needing it

    @property
    def tried(self) -> str:
        """What was tried, for the table."""
        return f"a forced call of `{self.tool}`, its result, an answer" if self.tool else "questions without tools"

    def call(self, place: Place) -> ForcedCall | None:
        """The call that its first request is forced to make."""
        return None if self.input is None else ForcedCall(self.tool, self.input(place))


@dataclass(frozen=True)
class Finished:
    """How an agent ended, and what it wrote."""

    code: int
    output: str
    errors: str


def installed_version(agent: Agent) -> str:
    """The version that is installed; "" = none."""
    if not agent.venv:
        about = NODE / agent.package / "package.json"
        return str(json.loads(about.read_text())["version"]) if about.exists() else ""
    name = agent.package.replace("-", "_")
    found = sorted((FOLDER / agent.venv).glob(f"lib/python3*/site-packages/{name}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else ""


def run_agent(agent: Agent, place: Place) -> Finished:
    """Run it to its end, at most `AGENT_S` seconds; it is stopped with all that it started in its process group."""
    (place.work / NOTE).write_text(SECRET + "\n")
    environment = _environment(place) | dict(agent.settings(place))
    process = subprocess.Popen(
        agent.command(place),
        cwd=place.work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, errors = process.communicate(timeout=AGENT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = "", f"stopped after {AGENT_S:.0f} s"
    finally:
        _stop_all(place.home)
        process.wait()
    return Finished(process.returncode, output, errors)


def _stop_all(home: Path) -> None:
    """End what the agent left running, such as a service of its own: the processes with its home folder."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("HOME") == str(home):
                process.kill()


def _environment(place: Place) -> dict[str, str]:
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), place.url)
    return proxies | {
        "PATH": f"{NODE / '.bin'}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(place.home),
        "TMPDIR": str(place.home),
        "NO_PROXY": "127.0.0.1,localhost,::1",
        "no_proxy": "127.0.0.1,localhost,::1",
        "TANDEM_KEY": place.key,
        "TERM": "dumb",
        "NO_COLOR": "1",
        "CI": "1",
        "DO_NOT_TRACK": "1",
    }


def _codex_settings(place: Place) -> Mapping[str, str]:
    place.write(
        ".codex/config.toml",
        f"""\
model = "{place.model}"
model_provider = "tandem"
model_context_window = {MAX_MODEL_LEN}
check_for_update_on_startup = false

[model_providers.tandem]
name = "Tandem"
base_url = "{place.url}/v1"
env_key = "TANDEM_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]
apps = false
plugins = false
remote_plugin = false
""",
    )
    return {}


def _codex(place: Place) -> list[str]:
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(NODE / ".bin" / "codex"), "exec", *flags, QUESTION]


def _claude_settings(place: Place) -> Mapping[str, str]:
    model = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), place.model)
    return model | {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": place.key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def _claude(place: Place) -> list[str]:
    return [str(NODE / ".bin" / "claude"), "--print", QUESTION, "--allowedTools", "Read"]


def _opencode_settings(place: Place) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Tandem",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "{env:TANDEM_KEY}"},
        "models": {place.model: {"name": place.model, "limit": {"context": MAX_MODEL_LEN, "output": 4096}}},
    }
    settings = {"provider": {"tandem": provider}, "autoupdate": False, "share": "disabled"}
    place.write(".config/opencode/opencode.json", {"$schema": "https://opencode.ai/config.json", **settings})
    return dict.fromkeys(
        (f"OPENCODE_DISABLE_{what}" for what in ("DEFAULT_PLUGINS", "MODELS_FETCH", "LSP_DOWNLOAD")), "1"
    )


def _opencode(place: Place) -> list[str]:
    return [str(NODE / ".bin" / "opencode"), "run", "--pure", "--model", f"tandem/{place.model}", QUESTION]


def _qwen_settings(place: Place) -> Mapping[str, str]:
    general = {"enableAutoUpdate": False, "disableAutoUpdate": True}
    privacy = {"privacy": {"usageStatisticsEnabled": False}, "telemetry": {"enabled": False}}
    place.write(".qwen/settings.json", {"general": general, **privacy})
    return {"OPENAI_API_KEY": place.key, "OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_MODEL": place.model}


def _qwen(place: Place) -> list[str]:
    return [str(NODE / ".bin" / "qwen"), "--auth-type", "openai", "--approval-mode", "yolo", QUESTION]


def _cline_settings(place: Place) -> Mapping[str, str]:
    name = "openai-compatible"
    settings = {"provider": name, "apiKey": place.key, "model": place.model, "baseUrl": f"{place.url}/v1"}
    providers = {name: {"settings": settings, "tokenSource": "manual", "updatedAt": "2026-01-01T00:00:00.000Z"}}
    place.write(".cline/data/settings/global-settings.json", {"telemetryOptOut": True, "autoUpdateEnabled": False})
    place.write(".cline/data/settings/providers.json", {"version": 1, "lastUsedProvider": name, "providers": providers})
    return {}


def _cline(place: Place) -> list[str]:
    return [str(NODE / ".bin" / "cline"), "--json", "-P", "openai", "-m", place.model, QUESTION]


def _continue_settings(place: Place) -> Mapping[str, str]:
    place.write(
        ".continue/config.yaml",
        f"""\
name: Tandem
version: 1.0.0
schema: v1
models:
  - name: Tandem
    provider: openai
    model: {place.model}
    apiBase: {place.url}/v1
    apiKey: {place.key}
    roles: [chat, edit, apply]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: {MAX_MODEL_LEN}
      maxTokens: 2048
""",
    )
    return {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_METRICS_ENABLED": "0"}


def _continue(place: Place) -> list[str]:
    config = str(place.home / ".continue" / "config.yaml")
    return [str(NODE / ".bin" / "cn"), "--print", "--auto", "--config", config, QUESTION]


def _pi_settings(api: str, path: str = "/v1") -> Callable[[Place], Mapping[str, str]]:
    def settings(place: Place) -> Mapping[str, str]:
        model = {"id": place.model, "contextWindow": MAX_MODEL_LEN, "maxTokens": 4096}
        provider = {"baseUrl": place.url + path, "api": api, "apiKey": "TANDEM_KEY", "models": [model]}
        place.write(".pi/agent/models.json", {"providers": {"tandem": provider}})
        return {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}

    return settings


def _pi(place: Place) -> list[str]:
    return [str(NODE / ".bin" / "pi"), "--print", "--provider", "tandem", "--model", place.model, QUESTION]


def _aider_settings(place: Place) -> Mapping[str, str]:
    limits: Json = {"max_input_tokens": MAX_MODEL_LEN, "max_output_tokens": 4096}
    limits |= {"litellm_provider": "openai", "mode": "chat"}
    place.write(".aider.model.metadata.json", {f"openai/{place.model}": limits})
    return {
        "OPENAI_API_BASE": f"{place.url}/v1",
        "OPENAI_API_KEY": place.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "AIDER_ANALYTICS_DISABLE": "true",
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_SHOW_RELEASE_NOTES": "false",
    }


def _aider(place: Place) -> list[str]:
    flags = ["--no-git", "--yes-always", "--no-show-model-warnings", "--no-pretty", "--no-detect-urls"]
    command = [str(FOLDER / "aider" / "bin" / "aider"), "--model", f"openai/{place.model}", *flags]
    return [*command, "--read", NOTE, "--message", QUESTION]


def _program(name: str, venv: str = "python") -> Callable[[Place], list[str]]:
    """One of `tests/clients/programs`."""
    path = REPOSITORY / "tests" / "clients" / "programs" / f"{name}_agent.py"
    return lambda _: [str(FOLDER / venv / "bin" / "python"), str(path)]


def _program_settings(place: Place) -> Mapping[str, str]:
    told = {"TANDEM_URL": place.url, "TANDEM_MODEL": place.model}
    return told | {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def _llm_settings(place: Place) -> Mapping[str, str]:
    place.write(
        ".config/io.datasette.llm/extra-openai-models.yaml",
        f"""\
- model_id: {place.model}
  model_name: {place.model}
  api_base: {place.url}/v1
  api_key_name: tandem
  supports_tools: true
""",
    )
    place.write(".config/io.datasette.llm/keys.json", {"tandem": place.key})
    return {}


def _llm(place: Place) -> list[str]:
    tool = "def read_note(path: str) -> str:\n    'The text of a file.'\n    return open(path).read()"
    return [str(FOLDER / "python" / "bin" / "llm"), "--model", place.model, "--functions", tool, QUESTION]


def _note_as(name: str) -> Callable[[Place], Json]:
    """The input of a tool that reads a file, by what it calls the file."""
    return lambda place: {name: place.note}


def _pi_agent(api: str, settings: Callable[[Place], Mapping[str, str]]) -> Agent:
    return Agent("pi", "@mariozechner/pi-coding-agent", api, _pi, settings, "read", _note_as("path"))


def _library(package: str, program: str, api: str, name: str = "") -> Agent:
    """A program of ours with a library."""
    tool = ("read_note", _note_as("path"))
    return Agent(name or package, package, api, _program(program), _program_settings, *tool, venv="python")


AGENTS = (
    Agent(
        "Codex", "@openai/codex", "Responses", _codex, _codex_settings, "exec_command", lambda _: {"cmd": f"cat {NOTE}"}
    ),
    Agent(
        "Claude Code", "@anthropic-ai/claude-code", "Messages", _claude, _claude_settings, "Read", _note_as("file_path")
    ),
    Agent(
        "opencode",
        "opencode-ai",
        "chat",
        _opencode,
        _opencode_settings,
        "read",
        _note_as("filePath"),
        asks_elsewhere="a library of plugins",
    ),
    Agent("qwen-code", "@qwen-code/qwen-code", "chat", _qwen, _qwen_settings, "read_file", _note_as("file_path")),
    Agent(
        "cline",
        "cline",
        "chat",
        _cline,
        _cline_settings,
        "run_commands",
        lambda _: {"commands": [f"cat {NOTE}"]},
        asks_elsewhere="feature flags",
    ),
    Agent("Continue", "@continuedev/cli", "chat", _continue, _continue_settings, "Read", _note_as("filepath")),
    _pi_agent("chat", _pi_settings("openai-completions")),
    _pi_agent("Responses", _pi_settings("openai-responses")),
    _pi_agent("Messages", _pi_settings("anthropic-messages", path="")),
    Agent("aider", "aider-chat", "chat", _aider, _aider_settings, venv="aider"),
    Agent("llm", "llm", "chat", _llm, _llm_settings, "read_note", _note_as("path"), venv="python"),
    Agent(
        "LiteLLM's Messages bridge",
        "litellm",
        "Responses",
        _program("litellm", "litellm"),
        _program_settings,
        "read_note",
        _note_as("path"),
        venv="litellm",
    ),
    _library("pydantic-ai-slim", "pydantic_ai", "chat", "pydantic-ai"),
    _library("openai-agents", "openai_agents", "Responses", "OpenAI Agents SDK"),
    _library("smolagents", "smolagents", "chat"),
    Agent("instructor", "instructor", "chat", _program("instructor", "litellm"), _program_settings, venv="litellm"),
)
