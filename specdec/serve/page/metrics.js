// What the panel beside the conversation shows: the plan's memory, and an answer's metrics.

import { $ } from "./dom.js";

const GIB = 2 ** 30;
const MAX_PASSES = 60;
const MAX_PARTS = 8;

const size = (bytes) =>
  bytes >= GIB ? `${(bytes / GIB).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`;

export function showPlan(plan) {
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

export class Metrics {
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
