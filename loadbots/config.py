"""The command line: every flag, its variable `LOADBOTS_<FLAG>`, and the one frozen object that comes of them.

A wrong value is a `WrongSettingError`: one line with the flag or the variable, what was expected and what came.
Keys are read from variables only (`LOADBOTS_AUTH_KEY`, `LOADBOTS_API_KEY`), so that no process list shows them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import msgspec

from loadbots.chaos import Chaos, parse_chaos
from loadbots.slo import Slo, parse_seconds, parse_slo

Arrival = Literal["closed", "constant", "poisson", "gamma", "spike"]
ARRIVALS: tuple[Arrival, ...] = ("closed", "constant", "poisson", "gamma", "spike")


class WrongSettingError(Exception):
    """One line for a person."""


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


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongSettingError(message)


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
            raise WrongSettingError(f"{variable(name)}={text!r}: expected 1 or 0")
        return text == "1"
    try:
        value = vars(parser.parse_args([flag, *text.split()] if action.nargs else [f"{flag}={text}"]))[name]
    except WrongSettingError as wrong:
        raise WrongSettingError(f"{variable(name)}={text!r}: {wrong}") from None
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
    if config.report is None and config.compare and config.out:
        raise WrongSettingError("--compare reads results and writes --report; it has no --out")


def _number(low: float, expected: str, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = float("nan")
        if not low <= number < float("inf"):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return number

    return read


def _parsed(parse: Callable[[str], object]) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            return parse(text)
        except ValueError as wrong:
            raise argparse.ArgumentTypeError(str(wrong)) from None

    return read


def _address(*schemes: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        scheme, found, rest = text.partition("://")
        if scheme not in schemes or not found or not rest.strip("/"):
            raise argparse.ArgumentTypeError(f"expected an address such as {schemes[0]}://127.0.0.1, got {text!r}")
        return text.rstrip("/")

    return read


_count = _number(1, "a whole number from 1", int)
_count_or_none = _number(0, "a whole number from 0", int)
_positive = _number(1e-6, "a number above 0")
_seconds = _parsed(parse_seconds)


def _seconds_or_none(text: str) -> float:
    return 0.0 if text in ("0", "0s") else float(str(_seconds(text)))


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m loadbots",
        description="A crowd of players for a storyteller: asks, hears, checks every word, and tells how it went.",
        epilog="Every flag is also a variable: --max-tokens is LOADBOTS_MAX_TOKENS. Keys are variables only: "
        "LOADBOTS_AUTH_KEY signs the players' tokens, LOADBOTS_API_KEY is the bearer of --openai. "
        "Exit code: 0 fine; 1 a story was broken, none got through, the SLO was missed, the counts differ, "
        "or nothing answered; 2 a wrong flag.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    _add_crowd(parser)
    _add_story(parser)
    _add_arrivals(parser)
    _add_judgement(parser)
    _add_output(parser)
    return parser


def _add_crowd(parser: Parser) -> None:
    group = parser.add_argument_group("the crowd")
    group.add_argument("--url", nargs="+", type=_address("ws", "wss"), metavar="URL",
        help="game port of one or more gateways, taken in turn (default ws://127.0.0.1:8765)")  # fmt: skip
    group.add_argument("--openai", type=_address("http", "https"), metavar="URL",
        help="an OpenAI-compatible server instead, its address ending in /v1")  # fmt: skip
    group.add_argument("--model", help="with --openai: the model's name (default: the server's first)")
    group.add_argument("--endpoint", choices=("chat", "completions"), help="with --openai (default chat)")
    group.add_argument("--players", nargs="+", type=_count, metavar="N",
        help="players at once; each number is a crowd and a row of its own (default 1; open loop 16)")  # fmt: skip
    group.add_argument("--stories", type=_count, help="stories of each player (default 4)")
    group.add_argument("--warmup", type=_count_or_none, help="stories of each player before the measuring (0)")
    group.add_argument("--think", type=_seconds_or_none, metavar="SECONDS", help="pause between stories (0)")
    group.add_argument("--ramp-up", type=_seconds_or_none, metavar="SECONDS",
        help="closed loop: players begin spread over this time (0)")  # fmt: skip
    group.add_argument("--chaos", type=_parsed(parse_chaos), metavar="DEEDS",
        help="such as drop=0.1,cancel=0.05,stall=0.02,storm")  # fmt: skip
    group.add_argument("--patience", type=_seconds,
        help="how long a player tries to get a connection or a place in the queue (60)")  # fmt: skip
    group.add_argument("--silence", type=_seconds, help="how long a player waits for the next frame (90)")
    group.add_argument("--processes", type=_count, metavar="N", help="spread the crowd over N processes (1)")


def _add_story(parser: Parser) -> None:
    group = parser.add_argument_group("the stories")
    group.add_argument("--max-tokens", type=_count, help="tokens of a story at most (100)")
    group.add_argument("--seed", type=_count_or_none, help="two runs with one seed ask the same (0)")
    group.add_argument("--ignore-end", action="store_true", help="ask for exactly --max-tokens")
    group.add_argument("--temperature", type=_number(0, "a number from 0"), help="default: the server's")
    group.add_argument("--top-k", type=_count_or_none, help="default: the server's")
    group.add_argument("--top-p", type=_number(0, "a number from 0 to 1"), help="default: the server's")
    group.add_argument("--voice", help="the storyteller's voice; default: the server's")
    group.add_argument("--verify", type=_count_or_none, metavar="N",
        help="replay so many stories of a process afterwards and compare (2000)")  # fmt: skip


def _add_arrivals(parser: Parser) -> None:
    group = parser.add_argument_group("open loop: asks come by the clock, latency counts from the intended moment")
    group.add_argument("--arrival", choices=ARRIVALS, help="default closed: the next ask after the last ending")
    group.add_argument("--rate", type=_positive, help="asks a second")
    group.add_argument("--ramp-to", type=_positive, metavar="RATE", help="the rate at the end, reached evenly")
    group.add_argument("--duration", type=_seconds, metavar="SECONDS",
        help="how long (open loop 60; closed loop: instead of --stories)")  # fmt: skip
    group.add_argument("--burstiness", type=_positive,
        help="shape of --arrival gamma: 1 is poisson, less is burstier (0.5)")  # fmt: skip
    group.add_argument("--spike", type=_count, metavar="N",
        help="--arrival spike: so many come at once, half-way (300)")  # fmt: skip
    group.add_argument("--max-players", type=_count, help="the pool of players grows up to this (2000)")
    group.add_argument("--find-knee", action="store_true",
        help="raise the rate until the SLO breaks, and say where; --duration is a step's (20)")  # fmt: skip


def _add_judgement(parser: Parser) -> None:
    group = parser.add_argument_group("the verdict")
    group.add_argument("--slo", type=_parsed(parse_slo), metavar="BOUNDS",
        help="such as first_text=1s,text_gap=250ms,story=10s")  # fmt: skip
    group.add_argument("--slo-share", type=_number(0, "a share from 0 to 1"), metavar="SHARE",
        help="the SLO is kept when this share of the stories keeps every bound (0.95)")  # fmt: skip
    group.add_argument("--reconcile", nargs="+", type=_address("http", "https"), metavar="URL",
        help="metrics pages of every gateway and storyteller: compare their counts with the bots'")  # fmt: skip


def _add_output(parser: Parser) -> None:
    group = parser.add_argument_group("what comes of it")
    group.add_argument("--out", metavar="FILE", help="the results as JSON")
    group.add_argument("--report", metavar="FILE", help="the results as one HTML page")
    group.add_argument("--compare", nargs="+", metavar="FILE",
        help="no crowd: compare earlier results, in a table and in --report")  # fmt: skip
    group.add_argument("--metrics-host", help="where the bots' own metrics listen (127.0.0.1)")
    group.add_argument("--metrics-port", type=_count_or_none, help="their port, 0 for none (9103)")
    group.add_argument("--live", action=argparse.BooleanOptionalAction, help="the live view on a terminal")
