"""The settings: flags, their variables `LOADBOTS_<FLAG>`, and the one frozen object that comes of them.

A wrong value is a `WrongSettingError`: one line with the flag or the variable, what was expected and what came.
Keys are read from variables only (`LOADBOTS_AUTH_KEY`, `LOADBOTS_API_KEY`), so that no process list shows them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadbots.arrivals import Arrival
from loadbots.chaos import Chaos
from loadbots.flags import Parser, WrongSettingError, build_parser
from loadbots.slo import Slo


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What to do; see `--help` for each field's meaning."""

    url: tuple[str, ...] = ("ws://127.0.0.1:8765",)
    players: tuple[int, ...] | None = None
    stories: int = 4
    max_tokens: int = 100
    seed: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    voice: str | None = None
    ignore_end: bool = False
    warmup: int = 0
    think: float = 0.0
    ramp_up: float = 0.0
    arrival: Arrival = "closed"
    rate: float | None = None
    ramp_to: float | None = None
    duration: float | None = None
    burstiness: float = 0.5
    spike: int = 300
    max_players: int = 2000
    chaos: Chaos = Chaos()
    slo: Slo | None = None
    slo_share: float = 0.95
    find_knee: bool = False
    patience: float = 60.0
    silence: float = 90.0
    verify: int = 2000
    processes: int = 1
    openai: str | None = None
    model: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    reconcile: tuple[str, ...] = ()
    out: str | None = None
    report: str | None = None
    compare: tuple[str, ...] = ()
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9103
    live: bool = True
    auth_key: str | None = None
    api_key: str | None = None
    end_flags: tuple[str, ...] = ()
    """What this OpenAI-compatible server calls `--ignore-end`, found out at the door."""
    run: str = "bot"
    """The beginning of every player's name; another one in every run."""

    @property
    def open_loop(self) -> bool:
        return self.arrival != "closed" or self.find_knee


def read_config(arguments: list[str], environment: Mapping[str, str]) -> Config:
    """Flags win over variables, variables over defaults."""
    parser = build_parser()
    given = vars(parser.parse_args(arguments))
    known = {action.dest: action for action in parser._actions if action.dest in Config.__struct_fields__}
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name, action in known.items():
        text = environment.get(variable(name))
        if text is not None and name not in fields:
            fields[name] = _from_variable(parser, name, action, text)
    config = Config(
        **fields,
        auth_key=environment.get("LOADBOTS_AUTH_KEY") or None,
        api_key=environment.get("LOADBOTS_API_KEY") or None,
        run=f"bot-{os.getpid():x}-{os.urandom(2).hex()}",
    )
    _check(config)
    return config


def variable(name: str) -> str:
    return f"LOADBOTS_{name.upper()}"


def _from_variable(parser: Parser, name: str, action: argparse.Action, text: str) -> object:
    flag = action.option_strings[-1]
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        if text not in ("0", "1"):
            raise WrongSettingError(f"{variable(name)}={text}: expected 1 or 0")
        return text == "1"
    try:
        value = vars(parser.parse_args([flag, *text.split()] if action.nargs else [f"{flag}={text}"]))[name]
    except WrongSettingError as wrong:
        said = str(wrong).removeprefix(f"argument {flag}: ")
        raise WrongSettingError(f"{variable(name)}={text}: {said}") from None
    return tuple(value) if isinstance(value, list) else value


def _check(config: Config) -> None:
    """What one flag cannot know of another."""
    if config.open_loop and config.rate is None and config.arrival != "closed":
        raise WrongSettingError(f"--arrival {config.arrival} needs --rate: asks a second")
    if config.find_knee and config.slo is None:
        raise WrongSettingError("--find-knee needs --slo: the bound that shall break")
    if config.arrival == "closed" and not config.find_knee and (config.rate or config.ramp_to):
        raise WrongSettingError("--rate and --ramp-to need an open loop: --arrival poisson, gamma, constant or spike")
    if config.openai and (config.chaos.drop or config.chaos.storm):
        raise WrongSettingError("--chaos drop and storm need the game protocol: an OpenAI stream cannot be resumed")
    for flag, path in (("--out", config.out), ("--report", config.report)):
        if path and not os.access(Path(path).parent, os.W_OK):
            raise WrongSettingError(f"{flag} {path}: expected a file in a folder that can be written to")
