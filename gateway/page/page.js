/**
 * The page: a connection, a wish, a place in the queue, a story.
 *
 * The protocol is `client.js`'s, the form `wish.js`'s, the pace of the text `reveal.js`'s, what is said `words.js`'s.
 */

import { Campfire } from "./client.js";
import { browser, kept, tab } from "./kept.js";
import { ReadAloud, Reveal } from "./reveal.js";
import * as wishes from "./wish.js";
import * as say from "./words.js";

const $ = (id) => document.getElementById(id);
const form = $("wish");
const pageTitle = document.title;
const port = Number(document.querySelector('meta[name="game-port"]').content) || 8765;
const url = `${location.protocol === "https:" ? "wss" : "ws"}://${location.hostname}:${port}`;

let stage = null; // the story in view: {story, wish, teller, opening, seed, reveal}
let ticking; // the clock behind every "in about 4 s"

// ---- the connection

const hash = () => new URLSearchParams(location.hash.slice(1));
const invitation = hash().get("token") ?? kept.get(tab, "token");
if (hash().has("token")) {
  kept.set(tab, "token", invitation);
  const rest = hash();
  rest.delete("token");
  history.replaceState(null, "", rest.size ? `#${rest}` : location.pathname);
}
const campfire = new Campfire(url, { token: invitation, player: kept.get(browser, "player") });

campfire.addEventListener("state", ({ detail }) => {
  const { state, code, reason } = detail;
  if (state === "open") {
    if (!invitation) kept.set(browser, "player", campfire.player);
    wishes.furnish(campfire.limits);
  }
  const trouble = state === "waiting" || state === "refused" || (state === "connecting" && !$("line").hidden);
  $("line").hidden = !trouble;
  $("now").hidden = state !== "waiting";
  if (!trouble) return;
  $("line-said").textContent = say.connection(state, code, reason, stage !== null && !stage.ended);
  tick();
});
$("now").addEventListener("click", () => campfire.retry());

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const wish = wishes.read();
  if (wish) tell(campfire.ask(wish), { wish });
});

// ---- the telling

/** Brings a story onto the stage and tells it to its end. */
async function tell(story, { wish, teller, opening }) {
  leave();
  const mine = (stage = { story, wish, opening, ended: false });
  mine.teller = teller ?? campfire.limits.voices?.[wish?.voice]?.name;
  mine.reveal = new Reveal($("story"), follow);
  mine.aloud = new ReadAloud($("read-aloud"));
  setTheStage(mine);
  for await (const frame of story) {
    if (stage !== mine) return; // leaving the loop stops the story
    if (frame.type === "queued") queued(mine, frame);
    else if (frame.type === "text") text(mine, frame);
    else await end(mine, frame);
  }
}

function leave() {
  stage?.reveal.stop();
  stage?.story.stop();
  stage = null;
  clearTimeout(ticking);
}

function setTheStage({ wish, teller, opening, story }) {
  form.hidden = true;
  $("telling").hidden = false;
  document.body.dataset.view = "telling";
  document.body.dataset.fire = "waiting";
  $("teller").textContent = wish ? `${teller ?? "The fire"} tells of` : "You are listening along";
  $("title").textContent = say.title(wish);
  document.title = `${say.title(wish)} · ${pageTitle}`;
  show("opening", opening);
  $("place").hidden = false;
  $("place-said").textContent = wish ? "The storyteller looks into the flames…" : "Listening for the storyteller…";
  $("eta").textContent = "";
  for (const id of ["ending", "story-error", "facts", "retry", "fresh", "other", "again", "share", "link"]) $(id).hidden = true;
  $("stop").hidden = false;
  $("stop").textContent = wish && story.story === undefined ? "Stop here" : "Stop listening";
  scrollTo({ top: 0, behavior: "instant" });
  $("title").focus({ preventScroll: true });
}

function queued(mine, { story, position, eta_ms, opening }) {
  if (hash().get("story") !== story) history.pushState(null, "", `#${new URLSearchParams({ story })}`);
  if (opening) show("opening", (mine.opening = opening));
  const { wish, teller } = mine;
  if (wish) kept.set(tab, `story ${story}`, { wish: { ...wish, seed: mine.story.wish?.seed ?? wish.seed }, teller, opening: mine.opening });
  mine.beginsAt = Date.now() + eta_ms;
  $("place-said").textContent = say.place(position);
  $("share").hidden = false;
  tick();
}

function text(mine, frame) {
  if (document.body.dataset.fire !== "telling") {
    document.body.dataset.fire = "telling";
    mine.beginsAt = undefined;
    $("place").hidden = true;
    $("share").hidden = false;
  }
  mine.reveal.push(frame.text);
  mine.aloud.push(frame.text);
}

async function end(mine, frame) {
  mine.ended = true;
  mine.aloud.end();
  $("place").hidden = true;
  $("stop").hidden = true;
  await mine.reveal.end();
  if (stage !== mine) return;
  const own = Boolean(mine.wish);
  document.body.dataset.fire = frame.type === "done" ? "embers" : "out";
  mine.seed = frame.seed ?? mine.wish?.seed;
  const failed = frame.type === "error" || ["failed", "expired"].includes(frame.finish_reason);
  if (failed) show("story-error", say.trouble(frame, campfire.limits));
  else show("ending", say.ending(frame, own, $("story").childElementCount > 0));
  if (frame.type === "done") show("facts", say.facts(frame));
  if (frame.type === "error") $("share").hidden = true;
  $("retry").hidden = !failed || (!own && frame.code === "not_found");
  $("fresh").hidden = false;
  $("fresh").classList.toggle("begin", $("retry").hidden);
  $("fresh").textContent = own ? "New story" : "Ask for your own";
  $("again").hidden = $("other").hidden = !own || failed;
  follow();
}

function show(id, words) {
  $(id).textContent = words ?? "";
  $(id).hidden = !words;
}

$("stop").addEventListener("click", () => stage?.story.stop());
$("again").addEventListener("click", () => repeat(stage.seed));
$("other").addEventListener("click", () => repeat(undefined));
$("retry").addEventListener("click", () => (stage.wish ? repeat(stage.wish.seed) : attend(stage.story.story)));
$("fresh").addEventListener("click", () => {
  history.pushState(null, "", location.pathname);
  welcome();
});

function repeat(seed) {
  const { wish, teller } = stage;
  tell(campfire.ask({ ...wish, seed }), { wish: { ...wish, seed }, teller });
}

$("share").addEventListener("click", async () => {
  const link = `${location.origin}${location.pathname}#${new URLSearchParams({ story: stage.story.story })}`;
  try {
    await navigator.clipboard.writeText(link); // not there, or refused, where the page came over plain http
    $("share").textContent = "Link copied";
    setTimeout(() => ($("share").textContent = "Copy link to listen along"), 2500);
  } catch {
    $("link").hidden = false;
    $("link").value = link;
    $("link").focus();
    $("link").select();
  }
});

// ---- the view

let following = true; // the reader is at the newest text, so the page goes along with it
addEventListener("scroll", () => (following = innerHeight + scrollY > document.body.scrollHeight - 140), { passive: true });
document.addEventListener("visibilitychange", () => document.hidden && stage?.reveal.hurry());

function follow() {
  const below = document.body.scrollHeight - innerHeight - scrollY;
  if (following && below > 0) scrollTo({ top: document.body.scrollHeight, behavior: "instant" });
}

/** Both clocks: until the story begins, and until the next try. */
function tick() {
  clearTimeout(ticking);
  const { state, retryAt } = campfire.status;
  $("line-wait").textContent = state === "waiting" ? say.tryingIn(retryAt - Date.now()) : "";
  $("eta").textContent = stage?.beginsAt === undefined ? "" : say.eta(stage.beginsAt - Date.now());
  if (state === "waiting" || stage?.beginsAt !== undefined) ticking = setTimeout(tick, 500);
}

function welcome() {
  leave();
  $("telling").hidden = true;
  form.hidden = false;
  document.body.dataset.view = "wish";
  document.body.dataset.fire = "embers";
  document.title = pageTitle;
  wishes.suggest();
  scrollTo({ top: 0, behavior: "instant" });
  wishes.focus();
}

function attend(story) {
  tell(campfire.listen(story), kept.get(tab, `story ${story}`) ?? {});
}

function route() {
  const story = hash().get("story");
  if (story && story !== stage?.story.story) attend(story);
  else if (!story && stage) welcome();
}
addEventListener("popstate", route);

wishes.suggest();
route();
fetch("/health")
  .then((answer) => answer.json())
  .then(({ model }) => model && ($("model").textContent = `Tonight the words come from ${String(model).split("/").pop()}.`))
  .catch(() => {}); // a nicety: the page is whole without it
