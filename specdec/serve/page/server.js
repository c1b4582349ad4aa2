// The server: its state, which is asked for again and again, its model, its plan, and an answer.

import { $ } from "./dom.js";
import { showPlan } from "./metrics.js";

const POLL_SECONDS = 5;
const RETRY_SECONDS = 1; // while it starts or is gone
const HEALTH_SECONDS = 10; // for an answer of /health
const LABELS = { gone: "server not reachable", failing: "model cannot be read", failed: "server failed" };

let status = "connecting";
let activity = ""; // of the answer that is being written
let timer = 0;

function showState() {
  const isBad = status in LABELS;
  $("state").textContent = isBad ? LABELS[status] : activity || status;
  $("state").classList.toggle("bad", isBad);
  document.body.classList.toggle("gone", status === "gone");
}

export function setActivity(text) {
  activity = text;
  showState();
}

async function getJson(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// Shows a choice if there are several models, whose cards have a status.
function chosenModel(cards) {
  const choice = $("models");
  choice.hidden = !cards[0].status;
  $("model").hidden = !choice.hidden;
  if (!choice.options.length) choice.append(...cards.map((card) => new Option(card.id)));
  choice.onchange = showModel;
  return choice.hidden ? cards[0] : cards.find((card) => card.id === choice.value);
}

async function showModel() {
  const model = chosenModel((await getJson("/v1/models")).data);
  $("model").textContent = model.id;
  document.title = `${model.id} – specdec`;
  $("note").hidden = model.has_chat_template !== false;
  $("note").textContent =
    "This model has no chat template: it is given a plain transcript, and may not answer as an " +
    "instruct model does.";
  // A model that has not been loaded yet has no plan to show.
  await getJson(`/v1/plan?model=${encodeURIComponent(model.id)}`).then(showPlan, () => {});
}

async function currentStatus() {
  try {
    const answer = await fetch("/health", { signal: AbortSignal.timeout(1000 * HEALTH_SECONDS) });
    const now = (await answer.json()).status;
    if (now === "ready" && status !== "ready") await showModel();
    return now;
  } catch {
    return "gone";
  }
}

export async function watch() {
  clearTimeout(timer);
  status = await currentStatus();
  showState();
  const seconds = status === "ready" ? POLL_SECONDS : RETRY_SECONDS;
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(watch, 1000 * seconds);
}

// A page that nobody looks at asks nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else watch();
});

// The browser's own words ("Failed to fetch", "network error") do not say what helps.
function unreachable(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("the server is not reachable: ask again when it is back");
}

// Yields the events of an answer.
export async function* ask(body, signal) {
  const reply = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify($("models").hidden ? body : { ...body, model: $("models").value }),
    signal,
  }).catch(unreachable);
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  for await (const event of events(reply)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

async function* events(answer) {
  const decoder = new TextDecoder();
  let buffer = "";
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read().catch(unreachable);
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
