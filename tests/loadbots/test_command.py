"""The command line: exit codes, one clear line for what is wrong, JSON last, reports, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from loadbots.__main__ import main
from tests.loadbots.crowds import command, start
from tests.loadbots.peer import peer

FIXED = {
    "players", "stories", "errors", "seconds", "tokens", "tokens_per_second", "first_text_ms", "text_gap_ms",
    "story_s", "goodput", "lost_frames", "repeated_frames", "broken_stories", "resumed", "cancelled",
}  # fmt: skip


async def test_the_last_line_and_the_file_are_the_rows(tmp_path: Path) -> None:
    async with peer() as here:
        ended = await command("--url", here.url, "--players", "1", "3", "--stories", "2", "--out",
                              str(tmp_path / "rows.json"), "--report", str(tmp_path / "crowd.html"))  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    assert [row["players"] for row in ended.rows] == [1, 3]
    assert all(row.keys() >= FIXED for row in ended.rows)
    assert all(row[name].keys() == {"p50", "p95", "p99"} for row in ended.rows
               for name in ("first_text_ms", "text_gap_ms", "story_s"))  # fmt: skip
    assert json.loads((tmp_path / "rows.json").read_text()) == ended.rows
    assert "\x1b" not in ended.out
    page = (tmp_path / "crowd.html").read_text()
    assert "<script src" not in page
    assert 'rel="stylesheet"' not in page


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "fast"], "argument --rate: expected a number above 0, got 'fast'"),
        (["--players", "0"], "argument --players: expected a whole number from 1, got '0'"),
        (["--url", "http://x"], "argument --url: expected an address such as ws://127.0.0.1, got 'http://x'"),
        (["--chaos", "flood=1"], "argument --chaos: expected drop=, cancel=, stall= or storm, got 'flood=1'"),
        (["--chaos", "drop=2"], "argument --chaos: expected drop= and a share from 0 to 1, got '2'"),
        (["--chaos", "drop=0.6,cancel=0.6"], "argument --chaos: expected shares that sum to 1 at most, got 1.2"),
        (["--slo", "latency=1s"], "argument --slo: expected one of first_text, text_gap, story, got 'latency'"),
        (["--slo", "story=soon"], "argument --slo: expected a time such as 500ms or 2s, got 'soon'"),
        (["--arrival", "poisson"], "--arrival poisson needs --rate: asks a second"),
        (["--rate", "3"], "--rate and --ramp-to need an open loop: --arrival poisson, gamma, constant or spike"),
        (["--find-knee"], "--find-knee needs --slo: the bound that shall break"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--out", "/nowhere/rows.json"], "--out /nowhere/rows.json: expected a file in a folder that can be"),
        (["--compare", "/nowhere.json"], "/nowhere.json: cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"loadbots: {said}")
    assert shown.err.count("\n") == 1


async def test_a_wrong_variable_is_named_with_its_value() -> None:
    ended = await command(env={**os.environ, "LOADBOTS_STORIES": "many"})
    assert ended.code == 2
    assert ended.err == "loadbots: LOADBOTS_STORIES=many: expected a whole number from 1, got 'many'\n"


async def test_variables_stand_for_flags() -> None:
    async with peer() as here:
        ended = await command("--stories", "1", env={**os.environ, "LOADBOTS_URL": here.url, "LOADBOTS_PLAYERS": "1 2"})
    assert [row["stories"] for row in ended.rows] == [1, 2]


async def test_an_address_that_does_not_answer_is_one_line_and_exit_code_1() -> None:
    for flag, address in (("--url", "ws://127.0.0.1:1"), ("--openai", "http://127.0.0.1:1/v1")):
        ended = await command(flag, address)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"loadbots: {address} does not answer: ")
        assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("unauthorized", "closed the hello with 4501 expected a token"),
        ("nonsense hello", "expected a frame of the protocol, got b'hello yourself'"),
    ],
)
async def test_a_gateway_that_lets_nobody_in_is_one_line_and_exit_code_1(fault: str, said: str) -> None:
    async with peer(fault) as here:
        ended = await command("--url", here.url)
    assert ended.code == 1
    assert said in ended.err
    assert ended.err.count("\n") == 1


async def test_a_broken_story_is_exit_code_1_and_said_in_words() -> None:
    async with peer("lost") as here:
        ended = await command("--url", here.url, "--stories", "2")
    assert ended.code == 1
    assert "1 player: broken: the text differs from the replay's (2)" in ended.out
    assert ended.rows[0]["lost_frames"] == 2


@pytest.mark.parametrize(("bound", "code", "verdict"), [("10s", 0, "fine"), ("1ms", 1, "missed")])
async def test_the_slo_sets_the_exit_code(bound: str, code: int, verdict: str) -> None:
    async with peer() as here:
        ended = await command("--url", here.url, "--stories", "3", "--slo", f"first_text={bound},story=60s")
    assert ended.code == code
    assert f"of the stories, {verdict}" in ended.out
    assert (ended.rows[0]["goodput"] > 0) == (code == 0)


async def test_ctrl_c_reports_what_was_heard() -> None:
    async with peer(pieces=50, pause=0.01) as here:
        process = await start("--url", here.url, "--players", "4", "--stories", "500")
        while len(here.asks) < 12:
            assert process.returncode is None
            await here.asked()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    (row,) = json.loads(out.splitlines()[-1])
    assert (process.returncode, err) == (0, b"")
    assert row["stories"] >= 4
    assert row["interrupted"] is True
    assert row["unfinished"] == 4
    assert row["broken_stories"] == 0


async def test_several_processes_make_the_row_that_one_makes() -> None:
    async with peer() as here:
        one = await command("--url", here.url, "--players", "5", "--stories", "2")
        asked = sorted((ask.seed or 0) for ask in here.asks)
        here.asks.clear()
        three = await command("--url", here.url, "--players", "5", "--stories", "2", "--processes", "3")
        assert sorted((ask.seed or 0) for ask in here.asks) == asked
    for name in ("players", "stories", "tokens", "frames", "verified", "errors", "endings", "broken_stories"):
        assert three.rows[0][name] == one.rows[0][name]
    assert (three.code, three.err) == (0, "")


async def test_a_knee_is_searched_for_and_said() -> None:
    async with peer(pieces=4) as here:
        ended = await command("--url", here.url, "--find-knee", "--slo", "first_text=2s", "--rate", "100",
                              "--duration", "150ms", "--max-players", "12", "--verify", "0")  # fmt: skip
    assert ended.out.splitlines()[-2].startswith("knee: the SLO holds at ")
    assert ended.code == 0
    rates = [row["rate"] for row in ended.rows]
    assert rates[:2] == [100, 150]


async def test_earlier_results_are_compared_without_a_crowd(tmp_path: Path) -> None:
    async with peer() as here:
        for name in ("before", "after"):
            await command("--url", here.url, "--players", "1", "2", "--out", str(tmp_path / f"{name}.json"))
    ended = await command("--compare", str(tmp_path / "before.json"), str(tmp_path / "after.json"),
                          "--report", str(tmp_path / "both.html"))  # fmt: skip
    assert ended.code == 0
    assert [row["name"] for row in ended.rows] == ["before", "before", "after", "after"]
    assert "after, 2 players" in (tmp_path / "both.html").read_text()
