// Small helpers for elements. Text only ever becomes text: nothing here reads HTML.

export const byId = (id) => document.getElementById(id);

// A new element with properties, attributes (names with a dash, `role`) and children.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export const button = (text, onclick, properties = {}) =>
  make("button", { type: "button", className: "link", textContent: text, onclick, ...properties });

// A button that puts the text it is given at the time into the clipboard.
export function copyButton(text) {
  const self = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
      self.textContent = "Copied";
    } catch {
      self.textContent = "No access";
    }
    setTimeout(() => (self.textContent = "Copy"), 1500);
  });
  return self;
}

// localStorage may be closed to us; what is kept there is a convenience.
export const kept = {
  get(name) {
    try {
      return JSON.parse(localStorage.getItem(`slipstream.${name}`));
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`slipstream.${name}`, JSON.stringify(value));
    } catch {
      /* not kept */
    }
  },
};

// Runs a function once before the next frame is painted, however often it is wanted.
const wanted = new Set();
let isPlanned = false;

export function beforePaint(run) {
  wanted.add(run);
  if (isPlanned) return;
  isPlanned = true;
  // A hidden tab paints no frames.
  if (document.hidden) setTimeout(runWanted, 200);
  else requestAnimationFrame(runWanted);
}

function runWanted() {
  isPlanned = false;
  const now = [...wanted];
  wanted.clear();
  for (const run of now) run();
}
