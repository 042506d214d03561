/**
 * A story's text as people meet it: `Reveal` for eyes, word by word at a calm pace; `ReadAloud` for screen readers,
 * sentence by sentence. Neither changes the text.
 */

const CALM = 0.045; // characters a millisecond, at least
const BEHIND_MS = 700; // what has arrived is shown within about so long
const LONG_WORD = 24; // scripts without spaces are shown in pieces of so many characters

/** Text into paragraphs of an element, each word appearing in its turn. */
export class Reveal {
  #element;
  #backlog = "";
  #newlines = 0; // since the last word
  #ended;
  #budget = 0;
  #last = 0;
  #frame = 0;
  #shown = () => {};

  /** @param {HTMLElement} element  emptied here  @param {() => void} shown  called after each change */
  constructor(element, shown) {
    this.#element = element;
    this.#shown = shown;
    element.replaceChildren();
  }

  push(text) {
    this.#backlog += text;
    this.#go();
  }

  /** Nothing more will come; resolves once all of it is shown. */
  end() {
    return new Promise((resolve) => {
      this.#ended = resolve;
      this.#go();
    });
  }

  /** Shows at once what has arrived; a hidden page paints no frames. */
  hurry() {
    this.#budget = Infinity;
    this.#step();
  }

  stop() {
    cancelAnimationFrame(this.#frame);
    this.#backlog = "";
  }

  #go() {
    if (document.hidden || matchMedia("(prefers-reduced-motion: reduce)").matches) this.hurry();
    else if (!this.#frame) {
      this.#last = performance.now();
      this.#frame = requestAnimationFrame((now) => this.#paint(now));
    }
  }

  #paint(now) {
    this.#frame = 0;
    this.#budget += (now - this.#last) * Math.max(CALM, this.#backlog.length / BEHIND_MS);
    this.#last = now;
    this.#step();
    if (this.#backlog) this.#frame = requestAnimationFrame((next) => this.#paint(next));
  }

  #step() {
    for (let word; this.#budget > 0 && (word = this.#next()); ) {
      this.#backlog = this.#backlog.slice(word.length);
      this.#budget -= word.length;
      this.#append(word);
    }
    this.#budget = Math.min(this.#budget, 0);
    if (this.#ended && !this.#backlog) this.#ended();
    this.#shown();
  }

  /** The next whole word with the space behind it; a word still growing is left for later. */
  #next() {
    const whole = this.#backlog.match(/^\s*\S+\s+/)?.[0];
    if (whole && whole.length <= LONG_WORD * 2) return whole;
    const hurried = this.#ended || this.#budget === Infinity || this.#backlog.length > LONG_WORD;
    return hurried ? [...this.#backlog].slice(0, LONG_WORD).join("") : "";
  }

  #append(word) {
    for (const [piece] of word.matchAll(/\n|[^\n]+/g)) {
      if (piece === "\n") this.#newlines++;
      else if (piece.trim() || !this.#newlines) this.#write(piece);
    }
  }

  #write(piece) {
    const paragraph = this.#element.lastElementChild;
    const span = document.createElement("span");
    span.className = "new";
    if (!paragraph || this.#newlines > 1) {
      if (!piece.trim()) return;
      span.textContent = piece.trimStart();
      this.#element.append(document.createElement("p"));
    } else span.textContent = (this.#newlines ? "\n" : "") + piece;
    this.#newlines = 0;
    this.#element.lastElementChild.append(span);
  }
}

/** Sentences into a live region, so that a screen reader speaks whole ones and not every piece. */
export class ReadAloud {
  #element;
  #growing = "";

  constructor(element) {
    this.#element = element;
    element.replaceChildren();
  }

  push(text) {
    this.#growing += text;
    const end = [...this.#growing.matchAll(/[.!?…。！？]["'”’»)\]]*\s+/g)].at(-1);
    if (end) this.#say(end.index + end[0].length);
  }

  end() {
    this.#say(this.#growing.length);
  }

  #say(length) {
    const sentences = this.#growing.slice(0, length).trim();
    this.#growing = this.#growing.slice(length);
    if (!sentences) return;
    const line = document.createElement("p");
    line.textContent = sentences;
    this.#element.append(line);
    while (this.#element.childElementCount > 3) this.#element.firstElementChild.remove();
  }
}
