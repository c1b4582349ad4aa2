// Conversations, kept in this browser: one item of localStorage each, so that two tabs with two
// conversations do not overwrite each other.
//
// A conversation is {id, title, system, messages, changed}; a message is {role, content}, and that
// of a model has `marks` (ranges of accepted draft tokens) and may have `reasoning` and `note`.

const PREFIX = "specdec.conversation.";
const CURRENT = "specdec.current"; // in sessionStorage: each tab has its own
const MAX_TITLE = 60;

export function newConversation(system = "") {
  // crypto.randomUUID is missing in pages of plain HTTP from another machine.
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  return { id, title: "", system, messages: [], changed: Date.now() };
}

export const isItem = (key) => key?.startsWith(PREFIX);

function parsed(text) {
  try {
    const item = JSON.parse(text);
    const isRight = Array.isArray(item.messages) && typeof item.id === "string";
    return isRight && item.messages.every((one) => typeof one.content === "string") ? item : null;
  } catch {
    return null; // of another program at this address, or null
  }
}

export class Store {
  // `onProblem` gets a sentence when the browser keeps nothing, and "" when it does again.
  constructor(onProblem) {
    this.onProblem = onProblem;
  }

  attempt(action, otherwise) {
    try {
      return action();
    } catch (error) {
      this.onProblem(
        error.name === "QuotaExceededError"
          ? "This browser's storage is full, so this conversation is not kept: delete others."
          : "This browser allows no storage, so conversations are not kept.",
      );
      return otherwise;
    }
  }

  list() {
    const items = this.attempt(
      () => Object.keys(localStorage).filter(isItem).map((key) => parsed(localStorage[key])),
      [],
    );
    return items.filter(Boolean).sort((a, b) => b.changed - a.changed);
  }

  load(id) {
    return this.attempt(() => parsed(localStorage.getItem(PREFIX + id)), null);
  }

  save(item) {
    const first = item.messages.find((message) => message.role === "user");
    if (!first) return;
    const title = first.content.trim().replace(/\s+/g, " ");
    item.title = title.length > MAX_TITLE ? `${title.slice(0, MAX_TITLE)}…` : title;
    // An answer without a text yet is none, if the page is left now.
    const messages = item.messages.filter((message) => message.content || message.reasoning);
    this.attempt(() => {
      localStorage.setItem(PREFIX + item.id, JSON.stringify({ ...item, messages }));
      this.onProblem("");
    });
  }

  remove(id) {
    this.attempt(() => localStorage.removeItem(PREFIX + id));
  }

  get current() {
    return this.attempt(() => this.load(sessionStorage.getItem(CURRENT)), null);
  }

  set current(item) {
    this.attempt(() => sessionStorage.setItem(CURRENT, item.id));
  }
}
