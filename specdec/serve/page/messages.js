// The messages of a conversation, as items of the log.

import { $, copy, make } from "./dom.js";
import { Markdown } from "./markdown.js";

const action = (name, label) =>
  make("button", { type: "button", className: `small ${name}`, textContent: label });

// Keeps the log at its end while it grows, unless the reader has scrolled up.
function followed(change) {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

// `onEdit` gets the new text of a user's message; undefined for a model's.
export class MessageView {
  constructor(message, onEdit) {
    this.message = message;
    this.onEdit = onEdit;
    const isUser = message.role === "user";
    this.body = make("div", { className: isUser ? "text plain" : "text" });
    this.actions = make("div", { className: "actions" });
    const who = make("span", { className: "who" }, isUser ? "You" : "Model");
    this.item = make("li", { className: message.role }, who, this.body, this.actions);
    if (isUser) this.addUser();
    else this.addModel();
    $("log").append(this.item);
    this.show();
    $("log").scrollTop = $("log").scrollHeight;
  }

  addUser() {
    const edit = action("edit", "Edit");
    edit.addEventListener("click", () => this.edit());
    this.actions.append(edit);
  }

  addModel() {
    this.markdown = new Markdown(this.body);
    const button = action("copy", "Copy");
    button.addEventListener("click", () => copy(this.message.content, button));
    this.actions.append(button);
    this.thinking = make("div", { className: "text plain" });
    this.summary = make("summary", {}, "Thinking");
    this.details = make("details", { className: "thinking", hidden: true }, this.summary, this.thinking);
    this.body.before(this.details);
    this.note = make("p", { className: "note", hidden: true });
    this.body.after(this.note);
  }

  show() {
    const { content, marks, reasoning, note } = this.message;
    if (this.message.role === "user") {
      this.body.textContent = content;
      return;
    }
    followed(() => {
      this.markdown.update(content, marks ?? []);
      this.details.hidden = !reasoning;
      this.summary.textContent = content ? "Thinking" : "Thinking …";
      // Appending keeps what a reader has selected.
      const text = reasoning ?? "";
      this.thinking.append(text.slice(this.thinking.textContent.length));
      this.actions.hidden = !content;
      this.note.hidden = !note;
      this.note.textContent = note ?? "";
    });
  }

  // Shows what has come at the next frame, however many events come before it.
  schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.show();
    });
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.show();
  }

  fail(text) {
    const line = make("p", { className: "error" }, text);
    line.setAttribute("role", "alert");
    this.body.after(line);
    $("log").scrollTop = $("log").scrollHeight;
  }

  edit() {
    const area = make("textarea", { value: this.message.content, rows: 3 });
    area.setAttribute("aria-label", "Edit your message");
    const send = make("button", { type: "submit" }, "Send again");
    const cancel = make("button", { type: "button" }, "Cancel");
    const hint = make("p", { className: "note" }, "What follows this message will be replaced.");
    const buttons = make("div", { className: "buttons" }, send, cancel);
    const form = make("form", { className: "edit-form" }, area, hint, buttons);
    const close = () => {
      form.replaceWith(this.body);
      this.actions.hidden = false;
      this.actions.firstElementChild.focus();
    };
    cancel.addEventListener("click", close);
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.target === area) sendOnEnter(event, form);
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.onEdit(area.value);
    });
    this.body.replaceWith(form);
    this.actions.hidden = true;
    area.focus();
  }
}

export function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}
