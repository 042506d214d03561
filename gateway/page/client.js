/**
 * The game protocol, version 1, in one module without dependencies: browsers, Deno, Bun, Node 22 and newer.
 *
 *     import { Campfire } from "./client.js";
 *
 *     const campfire = new Campfire("ws://127.0.0.1:8765");
 *     for await (const frame of campfire.ask({ words: ["dragon", "castle", "brave"] })) {
 *       if (frame.type === "queued") console.log(frame.opening, "place", frame.position);
 *       if (frame.type === "text") console.log(frame.text);
 *       if (frame.type === "done") console.log(frame.finish_reason, frame.seed);
 *       if (frame.type === "error") console.log(frame.code, frame.message);
 *     }
 *
 * A story is an async iterable of the gateway's own frames. Its last one is `done`, `error` or `left`, and there is
 * always one. A dropped socket is opened again and each story goes on right behind the last text that arrived, so the
 * loop above never sees a gap nor a piece twice. Leaving the loop early stops the story.
 *
 * Not covered: after a reconnect a story is attached by `listen`, so stopping it then ends the listening only; with
 * nobody left to hear it the gateway ends the story after its grace period.
 */

const PROTOCOL = 1;
const HELLO_TIMEOUT_MS = 10_000; // from opening the socket to `welcome`
const SILENCE_MS = 30_000; // without any frame while a story is unfinished: the line is taken for dead
const STEADY_MS = 10_000; // a connection that held for so long starts the back-off anew
const BACKOFF_MS = { first: 1_000, longest: 30_000 };
const RESUME_TRIES = 10; // for an attachment that the gateway refuses as temporary
const ENDINGS = new Set(["done", "error", "left"]);

const between = (low, high) => low + Math.random() * (high - low);

/** One connection to a gateway, kept up. Says `state` events; `event.detail` is what `status` then is. */
export class Campfire extends EventTarget {
  /** @type {{state: "connecting"|"open"|"waiting"|"refused"|"closed", retryAt?: number, code?: number, reason?: string}} */
  status = { state: "closed" };
  /** The player's name, once `welcome` told it; given again at each reconnect. @type {string|undefined} */
  player;
  /** `limits` of the newest `welcome`. */
  limits = {};

  #url;
  #token;
  #WebSocket;
  #socket = null;
  #stories = new Map(); // id -> Story, unfinished ones only
  #lastId = 0;
  #failures = 0; // connections in a row that did not hold
  #openedAt = 0;
  #retryTimer; // the next attempt
  #helloTimer;
  #silenceTimer;
  #ears = new AbortController(); // the listeners on the window

  /**
   * @param {string} url  of the game's door, ws: or wss:
   * @param {{token?: string, player?: string, WebSocket?: typeof WebSocket}} [options]
   */
  constructor(url, { token, player, WebSocket = globalThis.WebSocket } = {}) {
    super();
    this.#url = url;
    this.#token = token;
    this.player = player;
    this.#WebSocket = WebSocket;
    const signal = this.#ears.signal;
    globalThis.addEventListener?.("online", () => this.retry(), { signal });
    globalThis.addEventListener?.("offline", () => this.#lost(1006, "offline"), { signal });
    this.#connect();
  }

  /**
   * Asks for a story: `{ words: [...] }` or `{ prompt: "..." }`, and any other field of the `ask` frame.
   *
   * A seed is drawn here if none is given: gateways draw from 63 bits, a JavaScript number keeps 53 of them.
   */
  ask(wish) {
    const seed = wish.seed ?? Math.floor(Math.random() * 2 ** 32);
    return this.#begin({ type: "ask", ...wish, seed }, undefined, undefined);
  }

  /** Listens to any story, from its beginning or right behind a cursor. */
  listen(story, after) {
    return this.#begin(null, story, after);
  }

  /** Tries now instead of waiting for the back-off; nothing while there is a connection. */
  retry() {
    if (this.status.state === "waiting") this.#connect();
  }

  /** Ends the connection for good, and every unfinished story with `left`. */
  close() {
    this.#ears.abort();
    this.#drop();
    for (const story of [...this.#stories.values()]) this.#finish(story, leaving(story));
    this.#become({ state: "closed" });
  }

  #begin(wish, story, after) {
    if (this.status.state === "closed") throw new Error("this campfire is closed");
    const id = `${wish ? "a" : "l"}${++this.#lastId}`;
    const begun = new Story(id, wish && { ...wish, id }, story, after, () => this.#stop(begun));
    this.#stories.set(id, begun);
    // A gateway that drains takes no more asks: the next connection will.
    if (this.status.state === "open" && this.status.retryAt === undefined) this.#attach(begun);
    if (this.status.state === "refused") this.#finish(begun, this.#refusal(begun));
    return begun;
  }

  /** Says what brings this story onto the present connection: the ask itself, or a `listen` once it has its name. */
  #attach(story) {
    const { id, wish, after } = story;
    const frame = story.story === undefined ? wish : { type: "listen", id, story: story.story, after };
    const size = new TextEncoder().encode(JSON.stringify(frame)).length;
    if (size > (this.limits.frame_bytes ?? 8192)) {
      const message = `expected a frame of at most ${this.limits.frame_bytes ?? 8192} bytes, got ${size}`;
      this.#finish(story, { type: "error", id, code: "too_long", message, temporary: false });
    } else this.#send(frame);
  }

  #stop(story) {
    if (!this.#stories.has(story.id)) return;
    if (this.status.state === "open") this.#send({ type: "cancel", id: story.id });
    else this.#finish(story, leaving(story));
  }

  #connect() {
    this.#drop();
    this.#become({ state: "connecting" });
    const socket = (this.#socket = new this.#WebSocket(this.#url));
    this.#openedAt = Date.now();
    this.#helloTimer = setTimeout(() => this.#lost(1006, "no welcome"), HELLO_TIMEOUT_MS);
    // Every handler asks first whether its socket is still the present one: an old socket may speak late.
    const present = () => this.#socket === socket;
    socket.onopen = () => {
      if (!present()) return;
      this.#send({ type: "hello", protocol: PROTOCOL, ...(this.#token ? { token: this.#token } : { player: this.player }) });
    };
    socket.onmessage = (event) => present() && this.#hear(JSON.parse(event.data));
    socket.onclose = (event) => present() && this.#lost(event.code, event.reason);
  }

  #hear(frame) {
    this.#watch();
    if (frame.type === "welcome") this.#welcome(frame);
    else if (frame.type === "reconnect") this.#retryIn(between(...frame.in_ms));
    else if (this.#stories.has(frame.id)) this.#tell(this.#stories.get(frame.id), frame);
  }

  #welcome({ player, limits }) {
    clearTimeout(this.#helloTimer);
    this.player = player;
    this.limits = limits;
    this.#become({ state: "open" });
    for (const story of [...this.#stories.values()]) this.#attach(story);
  }

  #tell(story, frame) {
    if (frame.type === "queued") story.story = frame.story;
    if (frame.type === "text") story.after = frame.cursor;
    const again = frame.type === "error" && frame.temporary && story.story !== undefined;
    if (again && ++story.refusals <= RESUME_TRIES) {
      const socket = this.#socket;
      const wait = (frame.retry_after_ms ?? BACKOFF_MS.first) * between(1, 1.5);
      setTimeout(() => this.#socket === socket && this.#stories.has(story.id) && this.#attach(story), wait);
    } else if (ENDINGS.has(frame.type)) this.#finish(story, frame);
    else story.push(frame);
  }

  #finish(story, ending) {
    this.#stories.delete(story.id);
    story.push(ending);
  }

  /** The connection is gone: back off and come again, unless the gateway said not to. */
  #lost(code, reason) {
    if (this.#socket === null) return;
    const moving = this.status.state === "open" ? this.status.retryAt : undefined; // told by a `reconnect` frame
    if (Date.now() - this.#openedAt > STEADY_MS) this.#failures = 0;
    this.#drop();
    if (code >= 4500 && code < 5000) {
      this.#become({ state: "refused", code, reason });
      for (const story of [...this.#stories.values()]) this.#finish(story, this.#refusal(story));
      return;
    }
    const longest = Math.min(BACKOFF_MS.longest, BACKOFF_MS.first * 2 ** this.#failures++);
    const wait = moving === undefined ? between(100, longest) : Math.max(0, moving - Date.now());
    this.#retryTimer = setTimeout(() => this.#connect(), wait);
    this.#become({ state: "waiting", retryAt: Date.now() + wait, code, reason });
  }

  /** The gateway drains: it still serves this connection, the next one opens at a moment of our own. */
  #retryIn(wait) {
    clearTimeout(this.#retryTimer);
    this.#retryTimer = setTimeout(() => this.#connect(), wait);
    this.#become({ state: "open", retryAt: Date.now() + wait });
  }

  /** A dead line looks like a silent one: while a story is unfinished, silence means a new connection. */
  #watch() {
    clearTimeout(this.#silenceTimer);
    this.#silenceTimer = setTimeout(() => (this.#stories.size ? this.#lost(1006, "silence") : undefined), SILENCE_MS);
  }

  #drop() {
    for (const timer of [this.#retryTimer, this.#helloTimer, this.#silenceTimer]) clearTimeout(timer);
    const socket = this.#socket;
    this.#socket = null; // before close(): its handlers must find themselves replaced
    if (socket && socket.readyState < 2) socket.close();
  }

  #refusal({ id }) {
    const message = this.status.reason || `the gateway closed with ${this.status.code}`;
    const code = this.status.code === 4501 ? "unauthorized" : "bad_request";
    return { type: "error", id, code, message, temporary: false };
  }

  #send(frame) {
    this.#socket.send(JSON.stringify(frame));
    if (frame.type !== "hello") this.#watch();
  }

  #become(status) {
    this.status = status;
    this.dispatchEvent(new CustomEvent("state", { detail: status }));
  }
}

const leaving = ({ id, story }) => ({ type: "left", id, story });

/** One story as this client hears it: iterate it once, to its end. */
class Story {
  /** Refusals of an attachment in a row. */
  refusals = 0;
  #frames = [];
  #wake = () => {};
  #leave;

  constructor(id, wish, story, after, leave) {
    this.id = id;
    /** The `ask` frame; `null` for one that was only listened to. */
    this.wish = wish;
    /** The story's name, which others can listen to; known from the first `queued` on. */
    this.story = story;
    /** The cursor behind the newest text. */
    this.after = after;
    this.#leave = leave;
  }

  /** The player has heard enough. The ending comes as a frame: `done` (cancelled), or `left` for a listener. */
  stop() {
    this.#leave();
  }

  push(frame) {
    if (frame.type === "text") this.refusals = 0;
    this.#frames.push(frame);
    this.#wake();
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this.#frames.length) {
          const frame = this.#frames.shift();
          yield frame;
          if (ENDINGS.has(frame.type)) return;
        }
        await new Promise((wake) => (this.#wake = wake));
      }
    } finally {
      this.stop();
    }
  }
}
