"""The page in a real browser, against a gateway whose stories the test tells."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from gateway import wire
from tests.page.hand_told_gateway import OPENING, PAGE, Gateway, hand_told_gateway

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"no browser: expected Chromium at {CHROMIUM}"),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with hand_told_gateway() as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    context = await browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(10_000)
    yield context
    await context.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(context: BrowserContext, gateway: Gateway) -> AsyncIterator[Page]:
    """The page, loaded; whatever it logs as an error or asks of a stranger fails the test."""
    page, troubles = await context.new_page(), list[str]()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("request", lambda asked: None if "127.0.0.1" in asked.url else troubles.append(asked.url))
    await page.goto(gateway.url)
    await expect(page.get_by_label("The Hearth Keeper")).to_be_checked()
    yield page
    assert [trouble for trouble in troubles if "WebSocket connection" not in trouble] == []


async def ask(page: Page, *words: str) -> None:
    for place, word in zip(("First word", "Second word", "Third word"), words, strict=False):
        await page.get_by_label(place).fill(word)
    await page.get_by_role("button", name="Tell me a story").click()


async def test_three_words_become_a_story_with_its_opening_its_end_and_its_facts(page: Page, gateway: Gateway) -> None:
    await ask(page, "fox", "lantern", "storm")
    tale = await gateway.tale()
    assert tale.ask.words == ("fox", "lantern", "storm")
    assert tale.ask.voice == "hearth-keeper"
    await expect(page.get_by_role("heading", name="fox, lantern and storm")).to_be_focused()
    await expect(page.get_by_text(OPENING)).to_be_visible()
    await tale.tell("There was a fox.")
    await tale.tell("\n\nShe had a lantern.")
    await tale.end()
    await expect(page.locator("#story p")).to_have_text(["There was a fox.", "She had a lantern."])
    await expect(page.get_by_text("The end.")).to_be_visible()
    await expect(page.locator("#facts")).to_contain_text(f"seed {tale.ask.seed}")


async def test_without_words_the_fire_takes_those_that_it_suggests(page: Page, gateway: Gateway) -> None:
    suggested = await page.get_by_label("First word").get_attribute("placeholder")
    await ask(page)
    tale = await gateway.tale()
    assert tale.ask.words is not None
    assert tale.ask.words[0] == suggested
    assert len(tale.ask.words) == 3


async def test_a_wish_in_own_words_goes_to_the_chosen_voice_with_length_and_seed(page: Page, gateway: Gateway) -> None:
    await page.get_by_label("In your own words").check()
    await page.get_by_label("What should the story be about?").fill("A letter in the sand.")
    await page.get_by_label("Salt Marrow").check()
    await page.get_by_text("Length and seed").click()
    await page.get_by_label("Seed").fill("42")
    await page.get_by_label("Length").fill("60")
    await page.get_by_role("button", name="Tell me a story").click()
    asked = (await gateway.tale()).ask
    assert (asked.prompt, asked.voice, asked.seed, asked.max_tokens) == ("A letter in the sand.", "old-sailor", 42, 60)


async def test_a_seed_that_is_no_number_is_explained_and_asks_nothing(page: Page, gateway: Gateway) -> None:
    await page.get_by_text("Length and seed").click()
    await page.get_by_label("Seed").fill("seven")
    await page.get_by_role("button", name="Tell me a story").click()
    await expect(page.get_by_role("alert")).to_have_text("A seed is a number of up to 15 digits.")
    await expect(page.get_by_label("Seed")).to_be_focused()
    assert gateway.asked.empty()


async def test_the_keyboard_alone_gets_a_story_and_stops_it(page: Page, gateway: Gateway) -> None:
    await page.get_by_label("First word").press_sequentially("fox")
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Second word")).to_be_focused()
    await page.keyboard.type("storm")
    await page.keyboard.press("Enter")
    await page.keyboard.press("Enter")
    tale = await gateway.tale()
    await expect(page.get_by_role("heading", name="fox and storm")).to_be_focused()
    await tale.tell("There was")
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Stop here")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("You stopped the story here.")).to_be_visible()
    assert tale.done is not None
    assert tale.done.finish_reason == "cancelled"


async def test_the_voice_is_chosen_with_the_arrow_keys(page: Page) -> None:
    await page.get_by_label("The Hearth Keeper").focus()
    await page.keyboard.press("ArrowDown")
    await expect(page.get_by_label("Salt Marrow")).to_be_checked()
    await expect(page.get_by_label("Salt Marrow")).to_be_focused()


async def test_the_place_in_the_queue_and_the_time_to_wait_are_told(page: Page, gateway: Gateway) -> None:
    gateway.position, gateway.eta_ms = 3, 60_000
    await ask(page, "fox")
    tale = await gateway.tale()
    await expect(page.locator("#place")).to_contain_text(
        re.compile(r"3 stories are before yours\. It begins in about \d+ s")
    )
    await tale.queued(1, 20_000, None)
    await expect(page.locator("#place")).to_contain_text("One story is before yours.")
    await expect(page.get_by_text(OPENING)).to_be_visible()
    await tale.tell("There was a fox.")
    await expect(page.locator("#place")).to_be_hidden()


async def test_told_again_the_wish_is_the_same_with_the_same_seed(page: Page, gateway: Gateway) -> None:
    await ask(page, "fox", "storm")
    first = await gateway.tale()
    await first.tell("There was a fox.")
    await first.end()
    await page.get_by_role("button", name="Tell it again").click()
    second = await gateway.tale()
    assert (second.ask.words, second.ask.voice, second.ask.seed) == (first.ask.words, first.ask.voice, first.ask.seed)


async def test_told_differently_the_wish_is_the_same_with_another_seed(page: Page, gateway: Gateway) -> None:
    await ask(page, "fox", "storm")
    first = await gateway.tale()
    await first.end("length")
    await page.get_by_role("button", name="Tell it differently").click()
    second = await gateway.tale()
    assert second.ask.words == first.ask.words
    assert second.ask.seed != first.ask.seed


async def test_whoever_opens_the_link_hears_the_story_from_its_beginning(
    page: Page, context: BrowserContext, gateway: Gateway
) -> None:
    await ask(page, "fox")
    tale = await gateway.tale()
    await tale.tell("There was a fox. ")
    await expect(page).to_have_url(re.compile(r"/#story=s1$"))
    friend = await context.new_page()
    await friend.goto(page.url)
    await expect(friend.locator("#story")).to_have_text("There was a fox.")
    await tale.tell("She had a lantern.")
    await tale.end()
    for listener in (page, friend):
        await expect(listener.locator("#story")).to_have_text("There was a fox. She had a lantern.")
        await expect(listener.get_by_text("The end.")).to_be_visible()
    await expect(friend.get_by_role("button", name="Ask for your own")).to_be_visible()


async def test_a_listener_who_stops_leaves_the_story_to_the_others(
    page: Page, context: BrowserContext, gateway: Gateway
) -> None:
    await ask(page, "fox")
    tale = await gateway.tale()
    friend = await context.new_page()
    await friend.goto(f"{gateway.url}/#story={tale.name}")
    await friend.get_by_role("button", name="Stop listening").click()
    await expect(friend.get_by_text("You stopped listening here.")).to_be_visible()
    assert tale.done is None


async def test_the_link_is_copied_and_said_so(page: Page, context: BrowserContext, gateway: Gateway) -> None:
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    await ask(page, "fox")
    await gateway.tale()
    await page.get_by_role("button", name="Copy link").click()
    await expect(page.get_by_role("button", name="Link copied")).to_be_visible()
    assert await page.evaluate("navigator.clipboard.readText()") == f"{gateway.url}/#story=s1"


async def test_where_nothing_can_be_copied_the_link_is_shown_to_take(page: Page, gateway: Gateway) -> None:
    await page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    await ask(page, "fox")
    await gateway.tale()
    await page.get_by_role("button", name="Copy link").click()
    await expect(page.get_by_label("Link to listen along")).to_have_value(f"{gateway.url}/#story=s1")
    await expect(page.get_by_label("Link to listen along")).to_be_focused()


async def test_a_dropped_connection_goes_on_behind_the_last_text(page: Page, gateway: Gateway) -> None:
    await ask(page, "fox")
    tale = await gateway.tale()
    await tale.tell("There was a fox. ")
    await expect(page.locator("#story")).to_have_text("There was a fox.")
    await gateway.drop()
    await tale.tell("She had a lantern. ")
    listened = await gateway.listen()
    assert (listened.story, listened.after) == (tale.name, f"17.{tale.name}")
    await tale.tell("It was lit.")
    await tale.end()
    await expect(page.locator("#story")).to_have_text("There was a fox. She had a lantern. It was lit.")


async def test_a_connection_dropped_before_the_first_text_hears_the_whole_story(page: Page, gateway: Gateway) -> None:
    await ask(page, "fox")
    tale = await gateway.tale()
    await expect(page).to_have_url(re.compile("#story="))
    await gateway.drop()
    await tale.tell("There was a fox.")
    assert (await gateway.listen()).after is None
    await tale.end()
    await expect(page.locator("#story")).to_have_text("There was a fox.")


async def test_the_page_comes_back_as_the_same_player(page: Page, gateway: Gateway) -> None:
    assert (await gateway.hello()).player is None
    await gateway.drop()
    assert (await gateway.hello()).player == "guest-1"
    await page.reload()
    assert (await gateway.hello()).player == "guest-1"


async def test_a_draining_gateway_is_left_in_time_without_losing_text(page: Page, gateway: Gateway) -> None:
    await ask(page, "fox")
    tale = await gateway.tale()
    await gateway.hello()
    await gateway.say(wire.Reconnect((1, 50)))
    await tale.tell("There was a fox. ")
    await gateway.hello()
    await gateway.listen()
    await tale.tell("She had a lantern.")
    await tale.end()
    await expect(page.locator("#story")).to_have_text("There was a fox. She had a lantern.")


async def test_while_the_gateway_is_away_the_page_says_so_and_can_try_at_once(page: Page, gateway: Gateway) -> None:
    await gateway.hello()
    gateway.door = wire.Close.HEARTBEAT
    await gateway.drop()
    await expect(page.get_by_text("The fire cannot be reached.")).to_be_visible()
    gateway.door = None
    await page.get_by_role("button", name="Try now").click()
    await expect(page.locator("#line")).to_be_hidden()


async def test_a_close_code_from_4500_on_is_taken_as_final(page: Page, gateway: Gateway) -> None:
    gateway.door = wire.Close.UNAUTHORIZED
    await page.reload()
    await expect(page.get_by_text("This fire is for invited players")).to_be_visible()
    await expect(page.get_by_role("button", name="Try now")).to_be_hidden()
    await ask(page, "fox")
    await expect(page.get_by_role("alert")).to_contain_text("This fire is for invited players")


async def test_an_invitation_in_the_link_becomes_the_token_and_leaves_the_address(
    context: BrowserContext, gateway: Gateway
) -> None:
    guest = await context.new_page()
    await guest.goto(f"{gateway.url}/#token=a.b.c")
    assert (await gateway.hello()).token == "a.b.c"
    await expect(guest).to_have_url(f"{gateway.url}/")


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (wire.Error("busy", "1024 are waiting", True, None, 8000), "There should be room in about 8 s."),
        (wire.Error("rate_limited", "2 are unfinished", True), "You already have 2 on the way"),
        (wire.Error("too_long", "prompt: got 900 tokens", False), "Try fewer words."),
        (wire.Error("bad_request", "voice: got 'x'", False), "did not take this wish: voice: got 'x'."),
        (wire.Error("failed", "Redis is away", True), "Something broke on the way"),
    ],
    ids=lambda value: value.code if isinstance(value, wire.Error) else "",
)
async def test_a_refusal_is_told_in_words_and_can_be_tried_again(
    page: Page, gateway: Gateway, refusal: wire.Error, words: str
) -> None:
    gateway.refusal = refusal
    await ask(page, "fox")
    await expect(page.get_by_role("alert")).to_contain_text(words)
    await page.get_by_role("button", name="Try again").click()
    assert (await gateway.tale()).ask.words == ("fox",)
    await expect(page.get_by_role("alert")).to_be_hidden()


async def test_a_story_that_failed_or_expired_says_why(page: Page, gateway: Gateway) -> None:
    await ask(page, "fox")
    tale = await gateway.tale()
    await tale.tell("There was")
    await tale.end("failed", "the story was lost")
    await expect(page.get_by_role("alert")).to_contain_text("The story broke off: the story was lost.")
    await page.get_by_role("button", name="Try again").click()
    await (await gateway.tale()).end("expired")
    await expect(page.get_by_role("alert")).to_contain_text("nobody came to tell this one")


async def test_a_link_to_a_forgotten_story_says_so(context: BrowserContext, gateway: Gateway) -> None:
    guest = await context.new_page()
    await guest.goto(f"{gateway.url}/#story=long-ago")
    await expect(guest.get_by_role("alert")).to_contain_text("This story has gone up in smoke.")
    await guest.get_by_role("button", name="Ask for your own").click()
    await expect(guest.get_by_role("button", name="Tell me a story")).to_be_visible()


async def test_a_reload_in_the_middle_keeps_words_opening_and_the_way_to_tell_it_again(
    page: Page, gateway: Gateway
) -> None:
    await ask(page, "fox", "storm")
    tale = await gateway.tale()
    await tale.tell("There was a fox.")
    await expect(page.locator("#story")).to_have_text("There was a fox.")
    await page.reload()
    await expect(page.get_by_role("heading", name="fox and storm")).to_be_visible()
    await expect(page.get_by_text(OPENING)).to_be_visible()
    await gateway.listen()
    await tale.end()
    await page.get_by_role("button", name="Tell it again").click()
    assert (await gateway.tale()).ask.seed == tale.ask.seed


async def test_the_back_button_leads_from_the_story_to_the_wish(page: Page, gateway: Gateway) -> None:
    await ask(page, "fox")
    tale = await gateway.tale()
    await tale.end()
    await expect(page.get_by_text("The end.")).to_be_visible()
    await page.go_back()
    await expect(page.get_by_label("First word")).to_have_value("fox")
    await page.go_forward()
    await expect(page.get_by_role("heading", name="fox")).to_be_visible()


async def test_a_screen_reader_hears_whole_sentences_and_no_pieces(page: Page, gateway: Gateway) -> None:
    aloud = page.locator("[aria-live=polite]")
    await ask(page, "fox")
    tale = await gateway.tale()
    await tale.tell("There was a f")
    await expect(page.locator("#story")).to_have_text("There was a f")
    await expect(aloud).to_be_empty()
    await tale.tell("ox. She h")
    await expect(aloud.locator("p")).to_have_text(["There was a fox."])
    await tale.tell("ad a lantern.")
    await tale.end()
    await expect(aloud.locator("p")).to_have_text(["There was a fox.", "She had a lantern."])


async def test_markup_in_a_story_is_text(page: Page, gateway: Gateway) -> None:
    await ask(page, "<b>fox</b>")
    tale = await gateway.tale()
    await tale.tell("<img src=x onerror=alert(1)> & so on.")
    await tale.end()
    await expect(page.locator("#story")).to_have_text("<img src=x onerror=alert(1)> & so on.")
    await expect(page.get_by_role("heading", name="<b>fox</b>")).to_be_visible()


async def test_with_motion_the_text_grows_word_by_word_to_the_same_story(browser: Browser, gateway: Gateway) -> None:
    story = "There was a fox. " * 40 + "\n\n" + "昔々あるところに狐がいました。" * 5
    page = await browser.new_page(reduced_motion="no-preference")
    await page.goto(gateway.url)
    await ask(page, "fox")
    tale = await gateway.tale()
    await tale.tell(story)
    await expect(page.locator("#story span").first).to_have_text("There ")
    await tale.end()
    await expect(page.get_by_text("The end.")).to_be_visible()
    first, second = await page.locator("#story p").all_text_contents()
    assert f"{first}\n\n{second}" == story
    await page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_text_stands_out_from_its_ground(browser: Browser, gateway: Gateway, scheme: str) -> None:
    page = await browser.new_page(color_scheme="dark" if scheme == "dark" else "light")
    await page.goto(gateway.url)
    colors = await page.evaluate(
        """() => { const style = getComputedStyle(document.documentElement);
        return ["ground", "glow", "sheet", "ink", "soft", "ember", "on-ember", "trouble"].map(
            (name) => style.getPropertyValue("--" + name).trim()); }"""
    )
    ground, glow, sheet, ink, soft, ember, on_ember, trouble = colors
    pairs = [(text, behind) for text in (ink, soft, trouble) for behind in (ground, glow, sheet)]
    pairs += [(ember, ground), (ember, sheet), (on_ember, ember)]
    assert [pair for pair in pairs if contrast(*pair) < 4.5] == []
    await page.close()


def contrast(one: str, other: str) -> float:
    """As WCAG counts it, from #rrggbb."""

    def luminance(color: str) -> float:
        shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


async def test_on_a_phone_nothing_is_cut_off_and_every_button_can_be_hit(browser: Browser, gateway: Gateway) -> None:
    page = await browser.new_page(viewport={"width": 320, "height": 640}, reduced_motion="reduce", has_touch=True)
    await page.goto(gateway.url)
    await expect(page.get_by_label("The Hearth Keeper")).to_be_checked()
    await fits(page)
    await page.get_by_role("button", name="Tell me a story").tap()
    tale = await gateway.tale()
    await tale.tell("Donaudampfschifffahrtsgesellschaftskapitänsmütze" * 3 + " was lost. ")
    await tale.end()
    await expect(page.get_by_text("The end.")).to_be_visible()
    await fits(page)
    await page.close()


async def fits(page: Page) -> None:
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for button in await page.get_by_role("button").all():
        box = await button.bounding_box()
        assert box is not None
        assert box["height"] >= 32, await button.text_content()


async def test_the_page_holds_no_inline_code_no_raw_markup_and_no_stranger() -> None:
    for file in PAGE.iterdir():
        source = re.sub(r'xmlns="[^"]*"', "", file.read_text(encoding="utf-8"))
        assert not re.search(r"https?://(?!127\.0\.0\.1)", source), file
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(| style=\"| on\w+=\"", source), file
