// The conversation: what is sent, what comes, and the keys.

import { Api, ServerError } from "./api.js";
import { byId, kept, make } from "./dom.js";
import * as settings from "./settings.js";
import { hide } from "./tokens.js";
import { Turn } from "./turn.js";

const prompt = byId("prompt");
const scroller = byId("scroller");
const api = new Api(askForKey);
const STARTERS = {
  chat: [
    "Give me three tips for better sleep.",
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
  ],
  text: ["class Stack:", "def read_lines(path):", "import "],
};
let cards = []; // the server's models
let turns = [];
let edited = null; // the turn whose message is being edited
let running = null; // { controller, turn } of the answer that is being written
let isAtEnd = true; // whether the view follows the answer
let lastTop = 0;

const acts = { edit, repeat: (turn) => send(turn.text, turn), grow: follow };

function follow() {
  if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
}

function announce(text) {
  byId("status").textContent = text;
}

function resizePrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function setPrompt(text) {
  prompt.value = text;
  resizePrompt();
  prompt.focus();
}

// The conversation before a turn, or up to its end.
function messagesBefore(turn) {
  const at = turns.indexOf(turn);
  const system = settings.systemPrompt();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...turns.slice(0, at < 0 ? turns.length : at).flatMap((one) => one.messages),
  ];
}

// Sends a message: at the end, or in the place of a turn, which ends the conversation there.
async function send(text, replaced = null) {
  if (running) return;
  const turn = new Turn(text, acts);
  const messages = [...messagesBefore(replaced), { role: "user", content: text }];
  const at = replaced ? turns.indexOf(replaced) : turns.length;
  for (const gone of turns.splice(at)) gone.element.remove();
  turns.push(turn);
  byId("turns").append(turn.element);
  byId("empty").hidden = true;
  isAtEnd = true;
  follow();
  settings.clearMarks();
  await run(turn, messages);
}

async function run(turn, messages) {
  const controller = new AbortController();
  showRunning({ controller, turn });
  let outcome = {};
  try {
    const fields = settings.requestFields();
    const isPlain = !canChat();
    turn.start({ isSeveral: fields.n > 1, isJson: "response_format" in fields, isPlain });
    announce("The answer is being written.");
    const usage = { include_usage: true, continuous_usage_stats: true };
    const stream = { stream: true, stream_options: usage };
    const body = { model: byId("model").value, messages, ...fields, ...stream };
    const { signal } = controller;
    const chunks = isPlain ? api.complete(turn.text, body, signal) : api.chat(body, signal);
    for await (const chunk of chunks) turn.take(chunk);
  } catch (error) {
    outcome = controller.signal.aborted ? { isStopped: true } : { error };
    if (!(error instanceof ServerError) && !controller.signal.aborted) console.error(error);
  }
  turn.end(outcome);
  if (outcome.error) settings.mark(outcome.error.param);
  if (running?.turn === turn) showRunning(null);
  announce(outcome.error ? "" : `${outcome.isStopped ? "Stopped." : "Complete."} ${turn.summary}`);
  follow();
}

function showRunning(now) {
  running = now;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
}

function stop() {
  running?.controller.abort();
}

function edit(turn) {
  if (running) return;
  edited = turn;
  byId("editing").hidden = false;
  for (const one of turns)
    one.element.classList.toggle("edited", turns.indexOf(one) >= turns.indexOf(turn));
  setPrompt(turn.text);
}

function leaveEdit() {
  edited = null;
  byId("editing").hidden = true;
  for (const one of turns) one.element.classList.remove("edited");
}

function newChat() {
  stop();
  leaveEdit();
  turns = [];
  running = null;
  showRunning(null);
  byId("turns").replaceChildren();
  byId("empty").hidden = false;
  announce("New chat.");
  setPrompt("");
}

function submit() {
  const text = prompt.value;
  if (running || !text.trim()) return;
  const replaced = edited;
  leaveEdit();
  setPrompt("");
  send(text, replaced);
}

// What Escape does: the nearest thing that is open or going on ends.
function escape() {
  if (!byId("alternatives").hidden) return hide();
  if (running) return stop();
  if (edited) {
    leaveEdit();
    return setPrompt("");
  }
  settings.showSettings(false);
}

function setUpKeys() {
  prompt.oninput = resizePrompt;
  prompt.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "ArrowUp" && !prompt.value && turns.length && !running) {
      event.preventDefault();
      edit(turns.at(-1));
    }
  };
  document.addEventListener("keydown", (event) => {
    if (byId("key-box").open) return;
    if (event.key === "Escape") escape();
    if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.altKey) {
      event.preventDefault();
      newChat();
    }
  });
}

function setUpControls() {
  byId("composer").onsubmit = (event) => {
    event.preventDefault();
    submit();
  };
  byId("stop").onclick = () => {
    stop();
    prompt.focus();
  };
  byId("new").onclick = newChat;
  byId("open-settings").onclick = () => settings.showSettings(byId("settings").hidden);
  byId("close-settings").onclick = () => settings.showSettings(false);
  byId("change-key").onclick = async () => {
    if (await api.changeKey("An empty key removes the one in use.")) loadModels();
  };
  byId("model").onchange = () => {
    kept.set("model", byId("model").value);
    showModel();
  };
  scroller.onscroll = () => {
    hide();
    const { scrollTop, scrollHeight, clientHeight } = scroller;
    if (scrollHeight - scrollTop - clientHeight < 40) isAtEnd = true;
    else if (scrollTop < lastTop) isAtEnd = false; // up, so the user did it
    lastTop = scrollTop;
  };
}

// Resolves to the key that the user gives, or to null.
function askForKey(reason) {
  const box = byId("key-box");
  byId("key-reason").textContent = reason;
  byId("key-reason").hidden = !reason;
  byId("key").value = "";
  box.showModal();
  byId("key").focus();
  return new Promise((resolve) => {
    let key = null;
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = byId("key").value.trim();
      box.close();
    };
    byId("key-cancel").onclick = () => box.close();
    box.onclose = () => {
      byId("key").value = "";
      prompt.focus();
      resolve(key);
    };
  });
}

// Whether the chosen model chats; one without a chat template goes on with a text.
function canChat() {
  return cards.find(({ id }) => id === byId("model").value)?.has_chat_template !== false;
}

function showModel() {
  const isChat = canChat();
  byId("empty-model").textContent = byId("model").value || "the model";
  byId("empty-act").textContent = isChat ? "write" : "go on with";
  byId("empty-kind").hidden = isChat;
  prompt.placeholder = isChat ? "Write a message" : "Write the beginning of a text";
  const starters = STARTERS[isChat ? "chat" : "text"].map((text) =>
    make("button", { type: "button", className: "starter", onclick: () => send(text) }, text),
  );
  byId("starters").replaceChildren(...starters);
}

async function loadModels() {
  const select = byId("model");
  document.querySelector("#empty .fault")?.remove();
  try {
    cards = await api.models();
    select.replaceChildren(...cards.map(({ id }) => make("option", { value: id }, id)));
    const wanted = kept.get("model");
    if (cards.some(({ id }) => id === wanted)) select.value = wanted;
    showModel();
  } catch (error) {
    const again = make(
      "button",
      { type: "button", className: "link", onclick: loadModels },
      "Try again",
    );
    byId("empty").append(
      make(
        "div",
        { className: "fault", role: "alert" },
        make("p", {}, `No models: ${error.message}`),
        again,
      ),
    );
  }
}

settings.setUpSettings();
setUpKeys();
setUpControls();
loadModels();
