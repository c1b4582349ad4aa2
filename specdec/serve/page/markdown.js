// Markdown as elements. The library only parses; the elements are made here, from text nodes, so
// that no text of a model can become HTML, load an image or run a script.

import { copy, make } from "./dom.js";
import { lexer } from "./vendor/marked.js";

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const ENTITY = /&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#x([0-9a-f]{1,6}));/gi;
const TAGS = { strong: "strong", em: "em", del: "del", paragraph: "p", blockquote: "blockquote" };

function decoded(text) {
  return text.replace(ENTITY, (entity, name, decimal, hex) => {
    if (name) return ENTITIES[name.toLowerCase()];
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : entity;
  });
}

function address(href) {
  try {
    const url = new URL(href);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : "";
  } catch {
    return ""; // relative: a model knows no page of this server
  }
}

// Makes the elements of one block. `source` is its Markdown, and `marks` are ranges [begin, end)
// of it: each text is searched from the end of the one before, to mark its parts.
class Block {
  constructor(source, marks) {
    this.source = source;
    this.marks = marks;
    this.cursor = 0;
  }

  text(parent, text, decode = (part) => part) {
    for (const line of text.split(/(?<=\n)/)) {
      const begin = this.source.indexOf(line.trimEnd(), this.cursor);
      if (begin < 0) {
        parent.append(decode(line));
        continue;
      }
      this.cursor = begin + line.trimEnd().length;
      this.marked(parent, line, begin, decode);
    }
  }

  marked(parent, text, begin, decode) {
    let done = 0;
    for (const [from, to] of this.marks) {
      const first = Math.max(from - begin, done);
      const last = Math.min(to - begin, text.length);
      if (first >= last) continue;
      parent.append(decode(text.slice(done, first)));
      parent.append(make("span", { className: "right" }, decode(text.slice(first, last))));
      done = last;
    }
    parent.append(decode(text.slice(done)));
  }

  all(parent, tokens) {
    for (const token of tokens) this.add(parent, token);
    return parent;
  }

  add(parent, token) {
    const own = this[`add_${token.type}`];
    if (own) own.call(this, parent, token);
    else if (TAGS[token.type]) parent.append(this.all(make(TAGS[token.type]), token.tokens));
    else if (token.tokens) this.all(parent, token.tokens);
    else this.text(parent, token.text ?? token.raw, decoded);
  }

  add_space() {}

  add_def() {}

  add_br(parent) {
    parent.append(make("br"));
  }

  add_hr(parent) {
    parent.append(make("hr"));
  }

  add_html(parent, token) {
    this.text(parent, token.raw);
  }

  add_escape(parent, token) {
    this.text(parent, token.text);
  }

  add_codespan(parent, token) {
    const code = make("code");
    this.text(code, token.text);
    parent.append(code);
  }

  add_heading(parent, token) {
    // The page's own headings are h1 and h2.
    parent.append(this.all(make(`h${Math.min(token.depth + 2, 6)}`), token.tokens));
  }

  add_link(parent, token) {
    const href = address(token.href);
    const properties = { href, title: href, target: "_blank", rel: "noopener noreferrer" };
    parent.append(this.all(href ? make("a", properties) : make("span"), token.tokens));
  }

  add_image(parent, token) {
    this.add_link(parent, { href: token.href, tokens: [{ type: "escape", text: token.text || token.href }] });
  }

  add_checkbox(parent, token) {
    parent.append(token.checked ? "☑ " : "☐ ");
  }

  add_list(parent, token) {
    const list = make(token.ordered ? "ol" : "ul");
    if (token.ordered) list.start = token.start;
    for (const item of token.items) list.append(this.all(make("li"), item.tokens));
    parent.append(list);
  }

  add_table(parent, token) {
    const table = make("table");
    const cells = (row, items, tag) => {
      for (const cell of items) row.append(this.all(make(tag), cell.tokens));
    };
    cells(table.createTHead().insertRow(), token.header, "th");
    const body = table.createTBody();
    for (const row of token.rows) cells(body.insertRow(), row, "td");
    parent.append(make("div", { className: "wide", tabIndex: 0 }, table));
  }

  add_code(parent, token) {
    const code = make("code");
    this.text(code, token.text);
    const button = make("button", { type: "button", className: "small", textContent: "Copy code" });
    button.addEventListener("click", () => copy(token.text, button));
    const bar = make("div", { className: "code-bar" }, make("span", {}, token.lang ?? ""), button);
    const pre = make("pre", { tabIndex: 0 }, code);
    parent.append(make("div", { className: "code" }, bar, pre));
  }
}

// A text in an element, which is updated while the text grows: blocks that did not change stay.
export class Markdown {
  constructor(element) {
    this.element = element;
    this.sources = []; // of the blocks, each in an element
  }

  update(text, marks) {
    const source = text.replaceAll("\r", " ");
    let tokens;
    try {
      tokens = lexer(source, { gfm: true, breaks: true });
    } catch {
      tokens = [{ type: "html", raw: source }]; // nested too deeply: as it is
    }
    if (Object.keys(tokens.links ?? {}).length) this.sources = []; // a link's address may come late
    let begin = 0;
    tokens.forEach((token, i) => {
      if (this.sources[i] !== token.raw) this.replace(i, token, shifted(marks, begin, token.raw));
      begin += token.raw.length;
    });
    this.sources.length = tokens.length;
    while (this.element.children.length > tokens.length) this.element.lastElementChild.remove();
  }

  replace(i, token, marks) {
    const element = make("div");
    try {
      new Block(token.raw, marks).add(element, token);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // nested too deeply
      element.textContent = token.raw;
    }
    this.sources[i] = token.raw;
    const old = this.element.children[i];
    if (old) old.replaceWith(element);
    else this.element.append(element);
  }
}

function shifted(marks, begin, raw) {
  const inside = marks.filter(([from, to]) => to > begin && from < begin + raw.length);
  return inside.map(([from, to]) => [from - begin, to - begin]);
}
