/** Everything the page says that depends on what happened, in plain English. */

const WORDS = [
  "dragon castle brave", "fox lantern storm", "robot garden secret", "whale letter moon", "witch bakery cat",
  "river clock thief", "giant violin snow", "lighthouse key owl", "knight soup riddle", "comet orchard twin",
  "mouse crown winter", "pirate map feather", "ghost train apple", "bear mirror spring", "queen beetle bridge",
].map((three) => three.split(" "));

/** Three words that are not the ones before. */
let previous;
export function threeWords() {
  const others = WORDS.filter((three) => three !== previous);
  return (previous = others[Math.floor(Math.random() * others.length)]);
}

export function title(wish) {
  if (!wish) return "A story by the fire";
  if (wish.words) return new Intl.ListFormat("en-GB").format(wish.words);
  return wish.prompt.length > 90 ? `${wish.prompt.slice(0, 88).trimEnd()}…` : wish.prompt;
}

const seconds = (ms) => (ms < 90_000 ? `${Math.max(1, Math.round(ms / 1000))} s` : `${Math.round(ms / 60_000)} min`);

export function place(position) {
  if (position === 0) return "The storyteller draws a breath…";
  return position === 1 ? "One story is before yours." : `${position} stories are before yours.`;
}

export const eta = (ms) => (ms < 600 ? "" : `It begins in about ${seconds(ms)}.`);
export const tryingIn = (ms) => (ms < 600 ? "Trying again…" : `Trying again in ${seconds(ms)}.`);

export function connection(state, code, reason, telling) {
  if (state === "connecting") return "Finding the way back…";
  if (state === "waiting") {
    return telling ? "The connection dropped. Your story will go on where it stopped." : "The fire cannot be reached.";
  }
  if (code === 4501) return "This fire is for invited players: open the page with a valid token.";
  if (code === 4502) return "This page is older than the gateway: reload it.";
  return `The gateway let us go: ${reason || `code ${code}`}.`;
}

export function ending({ type, finish_reason, usage }, own, hasText) {
  if (type === "left") return own ? "You left the fire here." : "You stopped listening here.";
  if (finish_reason === "cancelled") return own ? (hasText ? "You stopped the story here." : "You called it off.") : "The one who asked for it stopped the story here.";
  if (finish_reason === "length") return `…and there the fire burns low. (${usage.completion_tokens} tokens, the length asked for)`;
  return "The end.";
}

export function trouble(frame, limits) {
  if (frame.type === "done") {
    if (frame.finish_reason === "expired") return "So many were waiting that nobody came to tell this one. Try again.";
    return `The story broke off${frame.message ? `: ${frame.message}` : " and could not be picked up"}. You can try again.`;
  }
  const wait = frame.retry_after_ms ? ` There should be room in about ${seconds(frame.retry_after_ms)}.` : "";
  return {
    busy: `Too many are waiting by the fire just now.${wait}`,
    rate_limited: `You already have ${limits.unfinished_asks || "as many stories as you may have"} on the way: let one end first.`,
    too_long: "That is more than the storyteller can keep in mind. Try fewer words.",
    unauthorized: "This fire is for invited players: open the page with a valid token.",
    forbidden: "That is not yours to do.",
    not_found: "This story has gone up in smoke. A finished one is kept for ten minutes.",
    bad_request: `The gateway did not take this wish: ${frame.message}.`,
  }[frame.code] ?? `Something broke on the way to the storyteller: ${frame.message}.${wait}`;
}

/** The small print that a developer wants to see. */
export function facts({ usage, seed, timing, unknown_words = [] }) {
  const unknown = unknown_words.length ? `The storyteller does not know ${unknown_words.map((word) => `“${word}”`).join(", ")}. ` : "";
  return unknown + [
    `${usage.completion_tokens} tokens`, `first words after ${timing.first_text_ms} ms`,
    `told in ${(timing.total_ms / 1000).toFixed(1)} s`, `seed ${seed}`,
  ].join("\u00a0· ");
}
