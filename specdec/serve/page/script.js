"use strict";

const $ = (id) => document.getElementById(id);
const GIB = 2 ** 30;
const MAX_PASSES = 60;
const MAX_PARTS = 8;

const messages = []; // of the conversation, without the system's
let running = null; // AbortController of the answer that is being written

// --- the server's state, its model and its plan -------------------------------------------------

async function getJson(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function connect() {
  const { status } = await (await fetch("/health")).json();
  if (status !== "ready") {
    $("state").textContent = status;
    setTimeout(retry, 1000);
    return;
  }
  const model = (await getJson("/v1/models")).data[0];
  $("model").textContent = model.id;
  document.title = `${model.id} – specdec`;
  $("note").hidden = model.has_chat_template !== false;
  $("note").textContent =
    "This model has no chat template: it is given a plain transcript, and may not answer as an " +
    "instruct model does.";
  showPlan(await getJson("/v1/plan"));
  $("state").textContent = status;
}

function retry() {
  connect().catch(() => {
    $("state").textContent = "not reachable";
    setTimeout(retry, 2000);
  });
}

const size = (bytes) =>
  bytes >= GIB ? `${(bytes / GIB).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`;

function showPlan(plan) {
  const all = Object.entries(plan.memory).filter(([name, bytes]) => bytes > 0 && name !== "available");
  all.sort((a, b) => b[1] - a[1]);
  const shown = all.slice(0, MAX_PARTS - 1);
  const rest = all.slice(MAX_PARTS - 1).reduce((sum, [, bytes]) => sum + bytes, 0);
  if (rest) shown.push(["other parts", rest]);
  const used = shown.reduce((sum, [, bytes]) => sum + bytes, 0);
  const free = Math.max(plan.memory_budget_bytes - used, 0);
  const parts = shown.map(([name, bytes], i) => [name, bytes, `p${i + 1}`]);
  if (free) parts.push(["free", free, "free"]);
  $("memory").textContent = `${size(plan.memory_budget_bytes)} budget`;
  $("bar").replaceChildren(...parts.map(([name, bytes, colour]) => {
    const piece = document.createElement("span");
    piece.className = colour;
    piece.style.flexGrow = bytes;
    piece.title = `${name}: ${size(bytes)}`;
    return piece;
  }));
  $("bar").setAttribute("aria-label", parts.map(([name, b]) => `${name} ${size(b)}`).join(", "));
  $("parts").tBodies[0].replaceChildren(...parts.map(([name, bytes, colour]) => {
    const row = document.createElement("tr");
    const mark = document.createElement("i");
    mark.className = colour;
    row.insertCell().append(mark, name);
    row.insertCell().append(size(bytes));
    return row;
  }));
  const resident = plan.n_layers - plan.n_streamed_layers;
  $("layers").textContent = plan.n_streamed_layers
    ? `${resident} of ${plan.n_layers} layers in memory; ` +
      `${size(plan.streamed_bytes_per_pass)} of the other layers are read for each pass`
    : `all ${plan.n_layers} layers in memory`;
}

// --- messages ----------------------------------------------------------------------------------

function addMessage(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "You" : "Model";
  const body = document.createElement("span");
  body.className = "text";
  body.textContent = text;
  item.append(who, body);
  $("log").append(item);
  $("log").scrollTop = $("log").scrollHeight;
  return body;
}

function addPiece(body, text, isRight) {
  if (!text) return;
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  const piece = document.createElement("span");
  if (isRight) piece.className = "right";
  piece.textContent = text;
  body.append(piece);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

// --- metrics -----------------------------------------------------------------------------------

class Metrics {
  constructor() {
    this.begin = performance.now();
    this.first = 0;
    this.tokens = 0;
    this.passes = [];
    for (const id of ["speed", "per-pass", "acceptance", "streamed", "stall", "first"]) {
      $(id).textContent = "–";
    }
  }

  addPass(draft) {
    if (!draft.n_tokens) return; // buffered text, at the end
    this.tokens += draft.n_tokens;
    if (!this.first) {
      this.first = performance.now();
      $("first").textContent = `${((this.first - this.begin) / 1000).toFixed(1)} s`;
      return; // the prompt's pass is no decode pass
    }
    this.passes.push(draft.n_tokens);
    const seconds = (performance.now() - this.first) / 1000;
    if (seconds > 0) $("speed").textContent = ((this.tokens - 1) / seconds).toFixed(1);
    const mean = (this.tokens - 1) / this.passes.length;
    $("per-pass").textContent = mean.toFixed(2);
    const last = this.passes.slice(-MAX_PASSES);
    const top = Math.max(...last, 2);
    const step = 300 / Math.max(last.length - 1, 1);
    const points = last.map((n, i) => `${(i * step).toFixed(1)},${(58 - (56 * n) / top).toFixed(1)}`);
    $("over-time").firstElementChild.setAttribute("points", points.join(" "));
    $("over-time").setAttribute("aria-label",
      `${last.length} passes, ${mean.toFixed(2)} tokens each on average, ${top} at most`);
  }

  // The server's own speed is shown at the end: before, the server may be ahead of the reader.
  finish(timings) {
    $("speed").textContent = timings.predicted_per_second.toFixed(1);
    $("per-pass").textContent = timings.tokens_per_pass.toFixed(2);
  }

  show(timings) {
    const share = timings.draft_n ? timings.draft_n_accepted / timings.draft_n : 0;
    $("acceptance").textContent =
      `${timings.draft_n_accepted} of ${timings.draft_n} (${(100 * share).toFixed(0)} %)`;
    $("streamed").textContent = size(timings.bytes_streamed);
    $("stall").textContent = `${(timings.stall_ms / 1000).toFixed(1)} s`;
  }
}

function showProgress({ total, processed }) {
  $("state").textContent = processed < total
    ? `reading the prompt: ${Math.floor((100 * processed) / total)} % of ${total} tokens`
    : "answering";
}

// --- an answer ---------------------------------------------------------------------------------

function requestBody() {
  const given = Object.fromEntries(new FormData($("settings")));
  const body = {
    messages: [...messages],
    stream: true,
    stream_options: { include_usage: true, include_draft: true },
    timings_per_token: true,
    return_progress: true,
  };
  if (given.system.trim()) body.messages.unshift({ role: "system", content: given.system });
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    if (given[name] !== "") body[name] = Number(given[name]);
  }
  return body;
}

async function* events(answer) {
  const decoder = new TextDecoder();
  let buffer = "";
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended in the middle of the answer: ask again");
    buffer += decoder.decode(value, { stream: true });
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      if (block === "data: [DONE]") return;
      yield JSON.parse(block.slice(6));
    }
  }
}

// Errors of settings are shown beside them, so the settings must be visible.
function settingsAreRight() {
  const settings = $("settings");
  if (!settings.checkValidity()) settings.closest("details").open = true;
  return settings.reportValidity();
}

async function answer() {
  const body = addMessage("assistant", "");
  const metrics = new Metrics();
  running = new AbortController();
  showButtons();
  let text = "";
  try {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()),
      signal: running.signal,
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      if (event.prompt_progress) showProgress(event.prompt_progress);
      if (event.draft) metrics.addPass(event.draft);
      if (event.timings) metrics.show(event.timings);
      if (event.usage) metrics.finish(event.timings);
      const piece = event.choices[0]?.delta.content ?? "";
      const nRight = event.draft?.n_accepted_characters ?? 0;
      const characters = [...piece]; // as the server counts them
      addPiece(body, characters.slice(0, nRight).join(""), true);
      addPiece(body, characters.slice(nRight).join(""), false);
      text += piece;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      const line = document.createElement("p");
      line.className = "error";
      line.setAttribute("role", "alert");
      line.textContent = error.message;
      body.after(line);
    }
  }
  running = null;
  if (text) messages.push({ role: "assistant", content: text });
  $("state").textContent = "ready";
  showButtons();
}

function showButtons() {
  const isRunning = running !== null;
  $("send").disabled = isRunning;
  $("stop").disabled = !isRunning;
  $("again").disabled = isRunning || !messages.length;
  $("clear").disabled = isRunning || !messages.length;
  $("log").setAttribute("aria-busy", String(isRunning));
  if (isRunning) $("state").textContent = "answering";
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim() || !settingsAreRight()) return;
  $("prompt").value = "";
  if (messages.at(-1)?.role === "user") messages.pop(); // it got no answer
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  answer();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", () => {
  if (!settingsAreRight()) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  $("log").lastElementChild.remove();
  answer();
});
$("clear").addEventListener("click", () => {
  messages.length = 0;
  $("log").replaceChildren();
  showButtons();
  $("prompt").focus();
});
$("show-drafts").addEventListener("change", (event) => {
  $("log").classList.toggle("marked", event.target.checked);
});
$("log").classList.add("marked");
retry();
$("prompt").focus();
