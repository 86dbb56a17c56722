// Markdown as it streams: append only, and made of elements that this file names.

import * as smd from "./vendor/streaming-markdown/smd.min.js";
import { copyButton, make } from "./dom.js";

const SAFE = /^(https?:|mailto:)/i;

// A view into which the text is written piece by piece.
export class Markdown {
  #parser;
  #plain = null;

  constructor(root) {
    this.root = root;
    this.#parser = smd.parser(renderer(root));
  }

  write(text) {
    this.#guard(text, () => smd.parser_write(this.#parser, text));
  }

  end() {
    this.#guard("", () => {
      smd.parser_end(this.#parser);
      // Markup that never came to its end, such as a lone "<", stays with the parser.
      const { text, pending, renderer } = this.#parser;
      if ((text + pending).trim()) renderer.add_text(renderer.data, text + pending);
    });
  }

  // A text that the parser cannot take goes on as plain text.
  #guard(text, act) {
    if (this.#plain) return this.#plain.append(text);
    try {
      act();
    } catch {
      this.#plain = this.root.appendChild(make("p", { className: "plain-text" }, text));
    }
  }
}

function renderer(root) {
  const base = smd.default_renderer(root);
  const { data } = base;
  const top = () => data.nodes[data.index];
  return {
    data,
    add_token(_, type) {
      // An image would be loaded from where the model says: it becomes a link.
      base.add_token(data, type === smd.IMAGE ? smd.LINK : type);
      if (type === smd.TABLE) wrapTable(top());
      if (type === smd.CODE_FENCE || type === smd.CODE_BLOCK) addHead(top());
    },
    end_token() {
      if (data.index > 0) base.end_token(data);
    },
    add_text(_, text) {
      top().append(text);
    },
    set_attr(_, type, value) {
      const node = top();
      if (type === smd.HREF || type === smd.SRC) setLink(node, value);
      else if (type === smd.LANG) node.parentNode.querySelector(".language").textContent = value;
      else base.set_attr(data, type, value);
    },
  };
}

function setLink(node, address) {
  const link = address.trim();
  if (!SAFE.test(link) || !URL.canParse(link)) {
    node.title = address;
    return;
  }
  node.href = link;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
}

function wrapTable(table) {
  const frame = make("div", { className: "table" });
  table.replaceWith(frame);
  frame.append(table);
}

function addHead(code) {
  const copy = copyButton(() => code.textContent);
  code.before(
    make("div", { className: "code-head" }, make("span", { className: "language" }), copy),
  );
  code.tabIndex = 0; // it scrolls sideways
}
