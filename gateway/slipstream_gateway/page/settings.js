// The settings: fields of the request, the theme, and what of them this browser keeps.

import { ServerError } from "./api.js";
import { byId, kept } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty"];
const INTEGERS = ["max_tokens", "top_k", "seed", "n"];
const NUM_ALTERNATIVES = 5;
const EXAMPLE = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 20 },
    age: { type: "integer", minimum: 1, maximum: 99 },
    likes: { type: "array", items: { type: "string", maxLength: 12 }, maxItems: 3 },
  },
  required: ["name", "age", "likes"],
  additionalProperties: false,
};

const field = (param) => document.querySelector(`[data-param="${param}"]`);
const inputs = () => [...byId("fields").querySelectorAll("[data-param]")];
const valueOf = (input) => (input.type === "checkbox" ? input.checked : input.value);

export function setUpSettings() {
  fill(kept.get("settings") ?? {});
  byId("fields").oninput = keep;
  byId("fields").onsubmit = (event) => event.preventDefault();
  byId("reset").onclick = () => {
    fill({});
    clearMarks();
    keep();
  };
  byId("example").onclick = () => {
    byId("schema").value = JSON.stringify(EXAMPLE, null, 2);
    keep();
  };
  setUpTheme();
}

function fill(values) {
  for (const input of inputs()) {
    const value = values[input.dataset.param];
    if (input.type === "checkbox") input.checked = value ?? false;
    else input.value = value ?? "";
  }
}

const keep = () =>
  kept.set(
    "settings",
    Object.fromEntries(inputs().map((one) => [one.dataset.param, valueOf(one)])),
  );

export const systemPrompt = () => byId("system").value.trim();

// The fields of a request that the panel sets. Raises ServerError for what is no number or JSON.
export function requestFields() {
  const fields = {};
  for (const name of [...NUMBERS, ...INTEGERS]) {
    const text = field(name).value.trim();
    if (text) fields[name] = number(name, text);
  }
  const stop = byId("stop-words").value.split("\n").filter(Boolean).map(unescaped);
  if (stop.length) fields.stop = stop;
  if (byId("log-probs").checked) {
    Object.assign(fields, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  }
  const schema = byId("schema").value.trim();
  if (schema) fields.response_format = format(schema);
  return fields;
}

function number(name, text) {
  const value = Number(text);
  const isGood = INTEGERS.includes(name) ? Number.isSafeInteger(value) : Number.isFinite(value);
  if (isGood) return value;
  const kind = INTEGERS.includes(name) ? "an integer of at most 53 bits" : "a number";
  throw new ServerError({ message: `${name} is "${text}", which is not ${kind}.`, param: name });
}

const unescaped = (text) =>
  text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);

function format(text) {
  try {
    const schema = JSON.parse(text);
    return { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  } catch (error) {
    const message = `The JSON schema is not JSON: ${error.message}`;
    throw new ServerError({ message, param: "response_format" });
  }
}

// Marks the field that an error names, such as `top_k` or `response_format.json_schema`.
export function mark(param) {
  const input = param && field(CSS.escape(param.split(/[.[]/)[0]));
  input?.setAttribute("aria-invalid", "true");
}

export function clearMarks() {
  for (const input of inputs()) input.removeAttribute("aria-invalid");
}

const THEMES = ["auto", "light", "dark"];

function setUpTheme() {
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    const name = theme[0].toUpperCase() + theme.slice(1);
    byId("theme").querySelector("span").textContent = name;
    byId("theme").setAttribute("aria-label", `Theme: ${name}`);
    byId("theme").title = `Theme: ${name}`;
  };
  const current = () => document.documentElement.dataset.theme;
  const saved = kept.get("theme");
  apply(THEMES.includes(saved) ? saved : "auto");
  byId("theme").onclick = () => {
    apply(THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length]);
    kept.set("theme", current());
  };
}

// Opens or closes the panel. On a narrow screen it covers the page, which is then out of reach.
export function showSettings(isOpen) {
  const panel = byId("settings");
  if (panel.hidden === !isOpen) return;
  panel.hidden = !isOpen;
  byId("open-settings").setAttribute("aria-expanded", String(isOpen));
  document.body.classList.toggle("with-settings", isOpen);
  const covers = matchMedia("(max-width: 800px)").matches;
  for (const part of [byId("chat"), document.querySelector(".bar")]) part.inert = isOpen && covers;
  (isOpen ? byId("close-settings") : byId("open-settings")).focus();
}
