// On narrow windows the conversations and the metrics are panels over the chat, one at a time.

import { $ } from "./dom.js";

let opener = null; // the button that opened the panel

const toggles = document.querySelectorAll("[data-panel]");

export function openPanel(id) {
  const button = document.querySelector(`[data-panel="${id}"]`);
  if (!button.checkVisibility()) return; // wide: both are beside the chat
  closePanel();
  opener = button;
  button.setAttribute("aria-expanded", "true");
  $(id).classList.add("open");
  $("chat").inert = true;
  $(id).querySelector("button, input, summary").focus();
}

// Returns whether a panel was open.
export function closePanel() {
  if (!opener) return false;
  $(opener.dataset.panel).classList.remove("open");
  opener.setAttribute("aria-expanded", "false");
  $("chat").inert = false;
  opener.focus();
  opener = null;
  return true;
}

for (const button of toggles) {
  button.addEventListener("click", () => {
    if (button === opener) closePanel();
    else openPanel(button.dataset.panel);
  });
}
// A window that becomes wide has no panels.
window.addEventListener("resize", () => opener && !opener.checkVisibility() && closePanel());
