// The chat: sends messages, shows answers as they come, and keeps conversations.

import { $, make } from "./dom.js";
import { Metrics } from "./metrics.js";
import { MessageView, sendOnEnter } from "./messages.js";
import { closePanel, openPanel } from "./panels.js";
import { ask, setActivity, watch } from "./server.js";
import { Store, isItem, newConversation } from "./store.js";

const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

const store = new Store((text) => {
  $("storage").hidden = !text;
  $("storage").textContent = text;
});
let conversation = newConversation();
let running = null; // AbortController of the answer that is being written

// --- an answer ----------------------------------------------------------------------------------

function requestBody() {
  const given = Object.fromEntries(new FormData($("settings")));
  const body = {
    // Thinking is not sent back: templates leave out that of earlier turns.
    messages: conversation.messages.map(({ role, content }) => ({ role, content })),
    stream: true,
    stream_options: { include_usage: true, include_draft: true },
    timings_per_token: true,
    return_progress: true,
  };
  const system = conversation.system;
  if (system.trim()) body.messages.unshift({ role: "system", content: system });
  for (const name of SAMPLING) if (given[name] !== "") body[name] = Number(given[name]);
  return body;
}

// Errors of settings are shown beside them, so the settings must be visible.
function settingsAreRight() {
  const settings = $("settings");
  if (!settings.checkValidity()) {
    openPanel("details");
    settings.closest("details").open = true;
  }
  return settings.reportValidity();
}

function addContent(message, piece, draft) {
  const begin = message.content.length;
  message.content += piece;
  // The server counts code points, and ranges count UTF-16 units, as strings do here.
  const accepted = [...piece].slice(0, draft?.n_accepted_characters ?? 0).join("").length;
  if (!accepted) return;
  const last = message.marks.at(-1);
  if (last?.[1] === begin) last[1] += accepted;
  else message.marks.push([begin, begin + accepted]);
}

function timeLeft({ total, cache, processed, time_ms }) {
  const seconds = Math.ceil((time_ms * (total - processed)) / (processed - cache) / 1000);
  if (!(seconds > 1 && seconds < Infinity)) return "";
  return seconds < 120 ? `, ${seconds} s left` : `, ${Math.ceil(seconds / 60)} minutes left`;
}

function showProgress(progress) {
  const { total, processed } = progress;
  const isReading = processed < total;
  const percent = Math.floor((100 * processed) / total);
  const reading = `reading the prompt: ${percent} % of ${total} tokens${timeLeft(progress)}`;
  setActivity(isReading ? reading : "answering");
  $("progress").hidden = !isReading;
  $("progress").value = processed / total;
}

function addEvent(event, message, metrics) {
  if (event.prompt_progress) {
    showProgress(event.prompt_progress);
  }
  if (event.draft) metrics.addPass(event.draft);
  if (event.timings) metrics.show(event.timings);
  if (event.usage) metrics.finish(event.timings);
  const choice = event.choices[0];
  if (!choice) return;
  addContent(message, choice.delta.content ?? "", event.draft);
  if (choice.delta.reasoning_content) {
    message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
  }
  if (choice.finish_reason === "length") {
    message.note = choice.finish_note || "The answer was cut off at its limit of tokens.";
  }
}

async function answer() {
  const body = requestBody();
  const message = { role: "assistant", content: "", marks: [] };
  const view = new MessageView(message);
  const metrics = new Metrics();
  running = new AbortController();
  conversation.messages.push(message);
  showButtons();
  try {
    for await (const event of ask(body, running.signal)) {
      addEvent(event, message, metrics);
      view.schedule();
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      view.fail(error.message);
      watch();
    }
  }
  running = null;
  view.finish();
  if (!message.content && !message.reasoning) conversation.messages.pop();
  keep();
  showButtons();
}

function showButtons() {
  const isRunning = running !== null;
  $("send").disabled = isRunning;
  $("stop").disabled = !isRunning;
  $("again").disabled = isRunning || !conversation.messages.length;
  $("new").disabled = isRunning;
  const buttons = "#conversations button, .edit, .edit-form [type=submit]";
  for (const button of document.querySelectorAll(buttons)) button.disabled = isRunning;
  $("log").setAttribute("aria-busy", String(isRunning));
  if (!isRunning) $("progress").hidden = true;
  setActivity(isRunning ? "answering" : "");
}

// --- the conversation -----------------------------------------------------------------------------

function addMessage(message) {
  return new MessageView(message, (text) => resend(message, text));
}

function post(text) {
  const messages = conversation.messages;
  if (messages.at(-1)?.role === "user") {
    messages.pop(); // it got no answer
    showMessages();
  }
  const message = { role: "user", content: text };
  messages.push(message);
  addMessage(message);
  keep();
  answer();
}

function resend(message, text) {
  if (running || !settingsAreRight()) return;
  conversation.messages.length = conversation.messages.indexOf(message);
  showMessages();
  post(text);
  $("prompt").focus();
}

function showMessages() {
  $("log").replaceChildren();
  for (const message of conversation.messages) addMessage(message);
}

function keep() {
  conversation.changed = Date.now();
  store.save(conversation);
  store.current = conversation;
  showList();
}

function show(chosen) {
  conversation = chosen;
  store.current = chosen;
  $("system").value = chosen.system;
  $("system-box").classList.toggle("set", Boolean(chosen.system.trim()));
  showMessages();
  showList();
  showButtons();
}

// --- the list of conversations --------------------------------------------------------------------

function listItem(item) {
  const open = make("button", { type: "button", className: "open" }, item.title);
  open.title = item.title;
  if (item.id === conversation.id) open.setAttribute("aria-current", "true");
  open.addEventListener("click", () => {
    show(store.load(item.id) ?? newConversation());
    closePanel();
    $("prompt").focus();
  });
  const remove = make("button", { type: "button", className: "small", title: "Delete" }, "✕");
  remove.setAttribute("aria-label", `Delete “${item.title}”`);
  remove.addEventListener("click", () => {
    if (!confirm(`Delete “${item.title}” from this browser?`)) return;
    store.remove(item.id);
    if (item.id === conversation.id) show(newConversation(conversation.system));
    showList();
    $("new").focus();
  });
  return make("li", {}, open, remove);
}

function showList() {
  $("conversations").replaceChildren(...store.list().map(listItem));
  for (const button of $("conversations").querySelectorAll("button")) button.disabled = Boolean(running);
}

window.addEventListener("storage", (event) => {
  if (event.key !== null && !isItem(event.key)) return;
  const changed = store.load(conversation.id);
  if (!running && changed && changed.changed !== conversation.changed) show(changed);
  else showList();
});
window.addEventListener("pagehide", () => running && store.save(conversation));

// --- what the user does ---------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim() || !settingsAreRight()) return;
  $("prompt").value = "";
  post(text);
});
$("prompt").addEventListener("keydown", (event) => sendOnEnter(event, $("composer")));
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || closePanel()) return;
  running?.abort();
});
$("again").addEventListener("click", () => {
  if (!settingsAreRight()) return;
  if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  showMessages();
  answer();
});
$("new").addEventListener("click", () => {
  show(newConversation(conversation.system));
  closePanel();
  $("prompt").focus();
});
$("system").addEventListener("input", () => {
  conversation.system = $("system").value;
  $("system-box").classList.toggle("set", Boolean(conversation.system.trim()));
});
$("system").addEventListener("change", () => conversation.messages.length && keep());
$("show-drafts").addEventListener("change", (event) => {
  $("log").classList.toggle("marked", event.target.checked);
});

show(store.current ?? newConversation());
watch();
$("prompt").focus();
