// The token heat map: each token coloured by its probability, its alternatives on hover and focus.

import { byId, make } from "./dom.js";

// Lower bounds of the classes p0 (likely) to p5 (unlikely).
const BOUNDS = [0.9, 0.7, 0.5, 0.3, 0.1];

const levelOf = (probability) => {
  const level = BOUNDS.findIndex((bound) => probability >= bound);
  return level < 0 ? BOUNDS.length : level;
};

const visible = (text) =>
  text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

export const percent = (logProb) => {
  const value = 100 * Math.exp(logProb);
  return value >= 99.95 || value === 0 ? `${Math.round(value)} %` : `${value.toPrecision(3)} %`;
};

// The tokens of one answer. `add` appends; nothing that is shown is made anew.
export class TokenMap {
  #entries = [];
  #decoder = new TextDecoder();
  #active = null;
  #line = null;

  constructor(root) {
    this.root = root;
    root.addEventListener("pointerover", (event) => this.#show(event.target));
    root.addEventListener("pointerleave", hide);
    root.addEventListener("focusin", (event) => this.#show(event.target));
    root.addEventListener("focusout", hide);
    root.addEventListener("keydown", (event) => this.#move(event));
  }

  add(entries) {
    for (const entry of entries) {
      const text = this.#textOf(entry);
      const level = levelOf(Math.exp(entry.logprob));
      const span = make("span", { className: `token p${level}`, tabIndex: -1 }, text || "◌");
      span.dataset.index = this.#entries.push(entry) - 1;
      // Blocks of lines: what comes is laid out without what is there.
      this.#line ??= this.root.appendChild(make("div"));
      this.#line.append(span);
      if (text.endsWith("\n")) this.#line = null;
    }
    if (!this.#active) this.#activate(this.root.querySelector(".token"));
  }

  // A character may be made of several tokens: the last of them has its text.
  #textOf({ token, bytes }) {
    return bytes ? this.#decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
  }

  // One token alone is a tab stop; the arrows go from there.
  #activate(span) {
    if (!span) return;
    if (this.#active) this.#active.tabIndex = -1;
    span.tabIndex = 0;
    this.#active = span;
  }

  #move(event) {
    const at = Number(event.target.dataset.index);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.#entries.length - 1 };
    const span = this.root.querySelector(`[data-index="${to[event.key]}"]`);
    if (!span) return;
    event.preventDefault();
    this.#activate(span);
    span.focus();
  }

  #show(span) {
    if (!span.classList.contains("token")) return hide();
    const entry = this.#entries[span.dataset.index];
    const box = byId("alternatives");
    const top = entry.top_logprobs ?? [];
    const isTop = top.some((one) => one.token === entry.token && one.logprob === entry.logprob);
    const rows = (isTop ? top : [entry, ...top]).map((one) => row(one, one.token === entry.token));
    box.replaceChildren(...rows);
    box.hidden = false;
    place(box, span.getClientRects()[0] ?? span.getBoundingClientRect());
    span.setAttribute("aria-describedby", box.id);
  }
}

export function hide() {
  byId("alternatives").hidden = true;
}

function row(entry, isChosen) {
  const bar = make("span", { className: "bar-of" });
  bar.style.setProperty("--share", Math.exp(entry.logprob));
  return make(
    "div",
    { className: isChosen ? "alternative chosen" : "alternative" },
    make("code", {}, visible(entry.token)),
    bar,
    make("span", { className: "percent" }, percent(entry.logprob)),
  );
}

// Below the token, or above it where there is no room.
function place(box, token) {
  const { width, height } = box.getBoundingClientRect();
  const left = Math.max(8, Math.min(token.left, innerWidth - width - 8));
  const isBelow = token.bottom + height + 8 < innerHeight;
  box.style.setProperty("left", `${left}px`);
  box.style.setProperty("top", `${isBelow ? token.bottom + 4 : token.top - height - 4}px`);
}
