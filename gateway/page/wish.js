/** The form: what the story should grow from, who tells it, how long. `furnish` fits it to a gateway, `read` reads it. */

import { browser, kept } from "./kept.js";
import { threeWords } from "./words.js";

const $ = (id) => document.getElementById(id);
const form = $("wish");

/** Voices and limits as this gateway has them. */
export function furnish({ voices = {}, max_tokens = 0 }) {
  const names = Object.keys(voices);
  $("voices").hidden = names.length < 2;
  if (names.join() !== [...form.elements.voice?.length ? form.elements.voice : []].map((input) => input.value).join()) {
    const chosen = kept.get(browser, "voice");
    $("voice-list").replaceChildren(...names.map((name) => card(name, voices[name], name === chosen)));
    if (!names.includes(chosen) && names.length) $("voice-list").querySelector("input").checked = true;
  }
  $("length-row").hidden = max_tokens <= 20;
  if (max_tokens > 20 && Number($("length").max) !== max_tokens) {
    Object.assign($("length"), { max: max_tokens, value: max_tokens });
  }
  tellLength();
}

function card(name, voice, checked) {
  const label = document.createElement("label");
  label.className = "card";
  const input = Object.assign(document.createElement("input"), { type: "radio", name: "voice", value: name, checked });
  const title = Object.assign(document.createElement("b"), { textContent: voice.name });
  const manner = Object.assign(document.createElement("span"), { textContent: voice.manner });
  label.append(input, title, manner);
  return label;
}

const words = [...form.querySelectorAll('[name="word"]')];
const tellLength = () => ($("length-told").textContent = `up to ${$("length").value} tokens`);

/** Other words to begin with, shown where none are written yet. */
export function suggest() {
  const picked = threeWords();
  words.forEach((input, i) => (input.placeholder = picked[i]));
}

form.addEventListener("input", () => {
  const free = form.elements.kind.value === "text";
  $("by-words").hidden = free;
  $("by-text").hidden = !free;
  $("wish-error").hidden = true;
  tellLength();
});

$("dice").addEventListener("click", () => {
  suggest();
  for (const input of words) input.value = input.placeholder;
});

for (const [i, input] of words.entries()) {
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || !words[i + 1] || words[i + 1].value) return;
    event.preventDefault();
    words[i + 1].focus();
  });
}

/** The `ask` that the form describes, or nothing and a word about what is missing. */
export function read() {
  const wish = {};
  if (form.elements.kind.value === "text") {
    wish.prompt = $("free").value.trim();
    if (!wish.prompt) return complain("Write what the story should be about.", $("free"));
  } else {
    if (words.every((input) => !input.value.trim())) words.forEach((input) => (input.value = input.placeholder));
    wish.words = words.map((input) => input.value.trim()).filter(Boolean);
  }
  if (form.elements.voice?.value) kept.set(browser, "voice", (wish.voice = form.elements.voice.value));
  if (!$("length-row").hidden && $("length").value !== $("length").max) wish.max_tokens = Number($("length").value);
  const seed = $("seed").value.trim();
  if (seed && !$("seed").checkValidity()) return complain("A seed is a number of up to 15 digits.", $("seed"));
  if (seed) wish.seed = Number(seed);
  return wish;
}

function complain(message, field) {
  field.closest("details")?.setAttribute("open", "");
  $("wish-error").textContent = message;
  $("wish-error").hidden = false;
  field.focus();
}

/** Where writing a wish begins. */
export function focus() {
  (form.elements.kind.value === "text" ? $("free") : words[0]).focus({ preventScroll: true });
}
