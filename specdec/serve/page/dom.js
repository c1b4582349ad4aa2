// Elements by their id, and new ones. Texts are always text nodes: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Pages of plain HTTP from another machine have no navigator.clipboard.
export async function copy(text, button) {
  let isCopied = true;
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text).catch(() => (isCopied = false));
  } else {
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    isCopied = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  button.textContent = isCopied ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = label), 1500);
}
