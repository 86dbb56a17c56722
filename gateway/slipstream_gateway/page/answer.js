// One answer: its text as markdown, JSON or tokens, its reasoning, and how it ended.

import { beforePaint, button, copyButton, make } from "./dom.js";
import { Markdown } from "./markdown.js";
import { TokenMap } from "./tokens.js";

const ENDS = {
  length: "Cut off: max tokens, or the end of the context.",
  abort: "Ended by the server.",
  stopped: "Stopped.",
};

// A plain text that grows; the interface of Markdown.
class Plain {
  constructor(root) {
    this.root = root.appendChild(make("pre", { className: "plain-text" }));
  }

  write(text) {
    this.root.append(text);
  }

  end() {}
}

function legend() {
  const levels = [0, 1, 2, 3, 4, 5].map((level) => make("i", { className: `p${level}` }));
  return make("span", { className: "legend" }, "likely", ...levels, "unlikely");
}

export class Answer {
  text = "";
  reasoning = "";
  finish = null;
  #unseen = { text: "", reasoning: "" }; // what the page does not show yet
  #entries = []; // log probs, in order
  #numMapped = 0; // of them in the map
  #map = null;
  #thought = null; // the view of the reasoning

  // `isJson`: the answer is held to a schema; `isPlain`: it is no markdown. `onGrow` runs after the
  // page shows more of it.
  constructor({ isJson, isPlain, onGrow }) {
    this.isJson = isJson;
    this.onGrow = onGrow;
    this.body = make("div", { className: "text" });
    this.tokens = make("div", {
      className: "tokens",
      role: "group",
      "aria-label": "Tokens",
      hidden: true,
    });
    this.note = make("p", { className: "note", hidden: true });
    this.tools = make(
      "div",
      { className: "tools", hidden: true },
      copyButton(() => this.text),
    );
    this.element = make(
      "article",
      { className: "answer" },
      this.body,
      this.tokens,
      this.note,
      this.tools,
    );
    this.view = isJson || isPlain ? new Plain(this.body) : new Markdown(this.body);
  }

  // Takes a choice of a chunk.
  add({ delta = {}, logprobs, finish_reason: finish }) {
    this.text += delta.content ?? "";
    this.#unseen.text += delta.content ?? "";
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
    this.reasoning += reasoning;
    this.#unseen.reasoning += reasoning;
    if (logprobs?.content) this.#entries.push(...logprobs.content);
    if (finish) this.finish = finish;
    beforePaint(this.show);
  }

  // Ends the answer, with a reason of our own where the server gave none.
  end(reason) {
    this.finish ??= reason;
    this.show();
    this.view.end();
    this.#thought?.end();
    const said = [ENDS[this.finish], this.isJson && this.#jsonState()].filter(Boolean);
    this.note.textContent = said.join(" ");
    this.note.hidden = said.length === 0;
    this.tools.hidden = !this.text && !this.#entries.length;
  }

  get isEmpty() {
    return !this.text && !this.reasoning && !this.#entries.length;
  }

  // Shows what has come since the last time.
  show = () => {
    const { text, reasoning } = this.#unseen;
    this.#unseen = { text: "", reasoning: "" };
    if (reasoning) this.#showReasoning(reasoning);
    if (text) this.view.write(text);
    if (this.#entries.length) this.#showTokens();
    this.onGrow();
  };

  #showReasoning(text) {
    if (!this.#thought) {
      const box = make("div", { className: "text" });
      this.element.prepend(
        make("details", { className: "reasoning" }, make("summary", {}, "Reasoning"), box),
      );
      this.#thought = new Markdown(box);
    }
    this.#thought.write(text);
  }

  #showTokens() {
    if (!this.#map) {
      this.#map = new TokenMap(this.tokens);
      this.#toggle = button("Text", () => this.#showMap(this.tokens.hidden));
      this.tools.append(this.#toggle, legend());
      this.#showMap(true);
    }
    if (this.tokens.hidden) return;
    this.#map.add(this.#entries.slice(this.#numMapped));
    this.#numMapped = this.#entries.length;
  }

  #toggle = null;

  #showMap(isMap) {
    this.tokens.hidden = !isMap;
    this.body.hidden = isMap;
    this.#toggle.textContent = isMap ? "Text" : "Tokens";
    if (isMap) this.#showTokens();
  }

  #jsonState() {
    try {
      JSON.parse(this.text);
      return "Complete JSON.";
    } catch {
      return "Not complete JSON.";
    }
  }
}
