"""Configuration of the engine that the workers of `tandem serve` run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

from tandem.protocol.config.panels import MANAGED
from tandem.protocol.settings import Setting, check_settings, require

EngineKindName = Literal["tandem", "vllm", "sglang"]


def _is_command_line(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedEngineConfig:
    """Which engine the workers run. The other settings are for engines other than Tandem's own."""

    engine_kind: Annotated[
        EngineKindName,
        Setting(
            "Engine of the workers: Tandem's own, or servers of vLLM or SGLang, which Tandem starts.",
            MANAGED,
            flag="--engine",
            metavar="ENGINE",
        ),
    ] = "tandem"
    engine_python: Annotated[
        str,
        Setting(
            "Python of the environment that has vLLM or SGLang; empty = the one that runs Tandem.",
            MANAGED,
            metavar="FILE",
        ),
    ] = ""
    engine_args: Annotated[
        str,
        Setting(
            "Flags of each vLLM or SGLang server, in one string: '-tp 2 --quantization fp8'.",
            MANAGED,
            metavar="FLAGS",
            is_valid=_is_command_line,
            rule="a command line whose quotation marks are closed",
        ),
    ] = ""
    engine_log_folder: Annotated[
        str,
        Setting(
            "Folder for the servers' logs on their machine; empty = only their last lines are shown if they fail.",
            MANAGED,
            metavar="FOLDER",
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("engine_python", "engine_args", "engine_log_folder"):
            require(
                self.is_managed or not getattr(self, name),
                f"{name}={getattr(self, name)!r} is for --engine vllm and sglang; leave it out",
            )

    @property
    def is_managed(self) -> bool:
        """Whether the workers are servers of another engine."""
        return self.engine_kind != "tandem"
