"""The command line: every flag, what it means, and what its value may be.

A flag that is not given leaves no trace in the parsed result: variables and defaults are `loadbots.config`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from loadbots.arrivals import ARRIVALS
from loadbots.chaos import parse_chaos
from loadbots.slo import parse_seconds, parse_slo


class WrongSettingError(Exception):
    """One line for a person."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongSettingError(message)


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
