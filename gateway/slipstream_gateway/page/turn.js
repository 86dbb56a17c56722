// A turn: what the user wrote, the answers to it side by side, how fast they came, what failed.

import { Answer } from "./answer.js";
import { beforePaint, button, make } from "./dom.js";

export class Turn {
  answers = [];
  chosen = 0;
  #times = { sent: 0, first: 0, last: 0 };
  #usage = null;

  // `acts`: functions of what the user can do with a turn: edit, repeat, grow.
  constructor(text, acts) {
    this.text = text;
    this.acts = acts;
    this.grid = make("div", { className: "answers" });
    this.figures = make("span", { className: "figures" });
    this.again = button("Try again", () => acts.repeat(this), {
      className: "link again",
      hidden: true,
    });
    this.foot = make("div", { className: "turn-foot" }, this.figures, this.again);
    this.fault = make("div", { className: "fault", role: "alert", hidden: true });
    const edit = button("Edit", () => acts.edit(this), { "aria-label": "Edit this message" });
    this.element = make(
      "li",
      { className: "turn" },
      make("div", { className: "user" }, make("p", {}, text), edit),
      this.grid,
      this.fault,
      this.foot,
    );
  }

  // Whether it ended without an answer.
  get isFailed() {
    return this.answers.every((answer) => !answer.text);
  }

  // The turn's messages for the next request; a failed one has none.
  get messages() {
    if (this.isFailed) return [];
    const { text } = this.answers[this.chosen];
    return [
      { role: "user", content: this.text },
      { role: "assistant", content: text },
    ];
  }

  // `isSeveral`: more than one answer is wanted; `isJson`: they are held to a schema; `isPlain`:
  // they go on with the text, and are no markdown.
  start({ isSeveral, isJson, isPlain }) {
    Object.assign(this, { isSeveral, isJson, isPlain });
    this.#times.sent = performance.now();
    this.element.classList.add("running");
    this.grid.classList.toggle("several", isSeveral);
    this.element.classList.toggle("broad", isSeveral);
  }

  take(chunk) {
    const now = performance.now();
    for (const choice of chunk.choices ?? []) {
      while (this.answers.length <= choice.index) this.#addAnswer();
      this.answers[choice.index].add(choice);
      const { content, reasoning, reasoning_content: thought } = choice.delta ?? {};
      if (!content && !reasoning && !thought) continue;
      this.#times.first ||= now;
      this.#times.last = now;
    }
    if (chunk.usage) this.#usage = chunk.usage;
    if (this.#times.first) beforePaint(this.#showFigures);
  }

  #addAnswer() {
    const answer = new Answer({ isJson: this.isJson, isPlain: this.isPlain, onGrow: this.acts.grow });
    const index = this.answers.push(answer) - 1;
    this.grid.append(answer.element);
    if (!this.isSeveral) return this.again.before(answer.tools);
    answer.pick = button(`Answer ${index + 1}`, () => this.#choose(index), {
      className: "pick",
      title: "The conversation goes on from this answer",
    });
    answer.element.prepend(answer.pick);
    this.#choose(0);
  }

  // Ends the turn: complete, stopped by the user, or with an error.
  end({ isStopped = false, error = null }) {
    for (const answer of this.answers) {
      if (error && answer.isEmpty) answer.element.remove();
      else answer.end(isStopped ? "stopped" : null);
    }
    this.element.classList.remove("running");
    this.element.classList.toggle("failed", this.isFailed);
    this.again.hidden = false;
    this.#showFigures();
    if (error) this.#showError(error);
  }

  // One line: time to the first token, tokens a second after it, counts.
  #showFigures = () => {
    const { sent, first, last } = this.#times;
    const { completion_tokens: count, prompt_tokens: prompt } = this.#usage ?? {};
    const cached = this.#usage?.prompt_tokens_details?.cached_tokens;
    const said = [];
    if (first) said.push(`first token ${duration(first - sent)}`);
    if (count > this.answers.length && last > first) {
      const rate = ((count - this.answers.length) * 1000) / (last - first);
      said.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
    }
    if (count !== undefined) said.push(`${count} ${count === 1 ? "token" : "tokens"}`);
    if (prompt !== undefined) said.push(`prompt ${prompt}${cached ? `, ${cached} cached` : ""}`);
    this.figures.textContent = said.join(" · ");
  };

  get summary() {
    return this.figures.textContent;
  }

  #showError({ message, param, code, type, status }) {
    const facts = { param, code, type, status };
    const said = Object.entries(facts).filter(([, value]) => value !== null && value !== undefined);
    this.fault.replaceChildren(
      make("p", {}, message),
      make(
        "p",
        { className: "facts" },
        said.map(([name, value]) => `${name}: ${value}`).join(" · "),
      ),
    );
    this.fault.hidden = false;
  }

  #choose(index) {
    this.chosen = index;
    this.answers.forEach((answer, at) => {
      answer.pick.setAttribute("aria-pressed", String(at === index));
      answer.element.classList.toggle("chosen", at === index);
    });
  }
}

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
