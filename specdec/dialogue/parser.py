"""Parser of a model's output in the format of its chat template."""

from __future__ import annotations

import re

from specdec.dialogue.calls import CallReader
from specdec.dialogue.cursor import SPACE, Cursor, Parsing
from specdec.dialogue.deltas import Delta
from specdec.dialogue.formats import (
    Calls,
    JsonCalls,
    NamedCalls,
    OutputFormat,
    TaggedCalls,
    ToolFormat,
)
from specdec.dialogue.json_calls import JsonCallReader
from specdec.dialogue.sink import DeltaSink
from specdec.dialogue.values import Cut, Malformed

_BARE_LIST = re.compile(r"\s*\[\s*(?P<name>[\w.]+)\s*")
_BARE_CALL = re.compile(r'\s*\{\s*"(name|type)"\s*:\s*"')
CUT_NOTE = "a tool call was cut off at the end of the text: raise max_tokens"
BROKEN_NOTE = "a tool call is broken and was dropped: "


class TextParser:
    """Incremental parser of a text, in which control tokens are single characters."""

    def __init__(self, form: OutputFormat) -> None:
        self._form, self._cursor = form, Cursor()
        self._sink = DeltaSink(form.types, form.tools, form.token_names, form.max_calls)
        self._reader = CallReader(self._cursor, self._sink, form.types)
        self._json = JsonCallReader(self._cursor, self._sink)
        self.reasoning_spans: list[tuple[int, int | None]] = []
        """Begins and ends of the reasoning in the text, in characters; None: it goes on."""
        self._parsing = self._parse()
        next(self._parsing, None)

    def push(self, text: str) -> list[Delta]:
        """Add text; return the deltas that are certain."""
        self._cursor.push(text)
        next(self._parsing, None)
        return self._sink.take()

    def finish(self, reason: str) -> list[Delta]:
        """Return the last deltas."""
        self._cursor.reason = reason
        next(self._parsing, None)
        return self._sink.take()

    def _parse(self) -> Parsing[None]:
        form = self._form
        if form.is_call_forced:
            yield from self._bare_calls()
        elif form.begins_in == "reasoning":
            yield from self.reasoning()
        elif form.begins_in == "call":
            yield from self.section()
        yield from self.content()

    # --- text and reasoning ----------------------------------------------------------------------

    def content(self, ends: tuple[str, ...] = ()) -> Parsing[str | None]:
        """Read text with everything that may stand in it, up to one of these ends."""
        thinking = self._form.thinking
        opens = thinking.opens if thinking else ()
        ignored = thinking.ignored if thinking else ()
        begins = self._form.tools.begins if self._form.tools else ()
        yield from self._bare_calls()
        is_start = True
        while True:
            mark = space = None
            if is_start:
                mark = yield from self._leading((*opens, *ignored, *begins, *ends))
            if mark is None:
                # Behind other text, tags of several letters are text, too.
                tokens = [open_mark for open_mark in opens if len(open_mark) == 1]
                mark, space = yield from self._cursor.read_until(
                    (*tokens, *ignored, *begins, *ends),
                    self._sink.text,
                    held_back=SPACE if begins else "",
                )
                is_start = False
            if mark is None or mark in ends:
                self._sink.text(space or "")
                return mark
            if mark in begins:
                yield from self.section(mark)
                yield from self._cursor.skip()
            elif mark in opens:
                yield from self.reasoning(len(mark))
            else:
                self._sink.text(space or "")
                continue
            is_start = True

    def _leading(self, marks: tuple[str, ...]) -> Parsing[str | None]:
        """Skip whitespace and one of the marks behind it; neither where none comes."""
        if not marks:
            return None
        self._cursor.mark()
        yield from self._cursor.skip()
        mark = yield from self._cursor.take(marks)
        text = self._cursor.marked()
        if mark is None:
            self._cursor.unread(text)
        return mark

    def reasoning(self, n_tag: int = 0) -> Parsing[None]:
        """Read reasoning, whose begin has been read. n_tag: characters of that."""
        thinking, tools = self._form.thinking, self._form.tools
        closes = thinking.closes if thinking else ()
        begins = tools.begins if tools else ()
        if tools and not tools.ends_reasoning:
            begins = tuple(mark for mark in begins if len(mark) == 1)
        self.begin_reasoning(n_tag)
        yield from self._cursor.skip()
        stop, _ = yield from self._cursor.read_until(
            (*closes, *begins), self._sink.reasoning, held_back=SPACE
        )
        if stop is not None and stop in begins:
            self._cursor.unread(stop)
        self.end_reasoning()
        yield from self._cursor.skip()
        yield from self._bare_calls()

    def begin_reasoning(self, n_tag: int = 0) -> None:
        self.reasoning_spans.append((self._cursor.position - n_tag, None))

    def end_reasoning(self) -> None:
        self.reasoning_spans[-1] = (self.reasoning_spans[-1][0], self._cursor.position)

    # --- calls -----------------------------------------------------------------------------------

    def _bare_calls(self) -> Parsing[None]:
        """Read calls without marks, where an answer begins with one."""
        tools = self._form.tools
        if tools is None:
            return
        self._cursor.mark()
        space = yield from self._cursor.skip()
        letter = yield from self._cursor.peek()
        names = None if tools.is_bare else self._form.types.__contains__
        n_before = self._sink.num_calls
        try:
            if letter == "{":
                while (yield from self._cursor.peek()) == "{":
                    self._cursor.marked()
                    self._cursor.mark()
                    yield from self._json.read(names)
                    yield from self._cursor.skip(SPACE + ";,")
                self._cursor.marked()
                return
            if letter == "[" and tools.is_bare and isinstance(tools.calls[0], NamedCalls):
                yield from self._calls(tools.calls, ())
                self._cursor.marked()
                return
            self._cursor.marked()
            self._cursor.unread(space)
        except Malformed as error:
            self._give_up(error, has_calls=self._sink.num_calls > n_before)

    def _give_up(self, error: Malformed, *, has_calls: bool) -> None:
        """Return to text after something that only began as a call without marks.

        has_calls: whether whole calls came before it.
        """
        raw = self._cursor.marked()
        listed = _BARE_LIST.fullmatch(raw)
        is_call = self._form.is_call_forced or _BARE_CALL.match(raw) is not None
        is_call = is_call or (listed is not None and self._form.types.is_begin(listed["name"]))
        is_call = is_call or (has_calls and bool(raw.strip(SPACE + ",;")))
        if self._sink.is_in_call or (isinstance(error, Cut) and is_call):
            is_cut = isinstance(error, Cut)
            self._sink.cut(CUT_NOTE if is_cut else f"{BROKEN_NOTE}{error}")
        else:
            self._sink.text(raw)

    def section(self, begin: str = "") -> Parsing[None]:
        """Read a section of calls, whose begin has been read."""
        tools = self._form.tools
        assert tools is not None
        calls = tools.calls
        self._cursor.mark(len(begin))
        if begin and any(begin == getattr(form, "opening", None) for form in calls):
            self._cursor.unread(begin)
        has_more = is_first = True
        n_before = self._sink.num_calls
        while has_more:
            try:
                yield from self._calls(calls, tools.ends)
                self._cursor.marked()
                return
            except Malformed as error:
                n_begin = len(begin) if is_first and self._sink.num_calls == n_before else 0
                has_more = yield from self._recover(error, tools, n_begin)
                is_first = False

    def _recover(self, error: Malformed, tools: ToolFormat, n_begin: int) -> Parsing[bool]:
        """Show a broken block as text, unless a call had begun, and go to its end.

        n_begin: characters of the block that are its begin.

        Return whether another call of the same section follows.
        """
        is_in_call = self._sink.is_in_call
        is_cut = isinstance(error, Cut) or self._ends_in_a_part(tools)
        if is_in_call or is_cut:
            self._sink.cut(CUT_NOTE if is_cut else f"{BROKEN_NOTE}{error}")
        if is_cut:
            self._cursor.advance(len(self._cursor.rest))
            self._cursor.marked()
            return False
        if not is_in_call:
            self._cursor.rewind(max(n_begin, 1))
        openings = tuple(filter(None, (getattr(form, "opening", "") for form in tools.calls)))
        ends = tools.ends or tuple(
            form.closing for form in tools.calls if isinstance(form, TaggedCalls)
        )
        stop, _ = yield from self._cursor.read_until((*ends, *tools.begins, *openings), _ignore)
        if stop in tools.begins or stop in openings:
            assert stop is not None
            self._cursor.unread(stop)
        raw = self._cursor.marked()
        if not is_in_call:
            self._sink.text(raw)
        self._cursor.mark()
        return stop in openings

    def _ends_in_a_part(self, tools: ToolFormat) -> bool:
        """Return whether the text ends in a part of a mark."""
        rest = self._cursor.rest.strip()
        marks = (*tools.ends, *(mark for form in tools.calls for mark in form.marks))
        return self._cursor.reason is not None and any(mark.startswith(rest) for mark in marks)

    def _calls(self, forms: tuple[Calls, ...], ends: tuple[str, ...]) -> Parsing[None]:
        """Read calls up to the section's end. Raises Malformed, Cut."""
        is_first, is_list = True, False
        while True:
            yield from self._cursor.skip(SPACE + ",;")
            if (yield from self._cursor.take(ends)):
                return
            letter = yield from self._cursor.peek()
            if letter == "[" and is_first and not is_list:
                self._cursor.advance(1)
                is_list = True
                continue
            if letter == "]" and is_list:
                self._cursor.advance(1)
                is_list = is_first = False
                continue
            if not letter:
                if is_first or is_list:
                    raise Cut("a section of calls is incomplete")
                return
            if not (yield from self._call(forms, letter, is_first or is_list)):
                return
            is_first = False
            self._cursor.marked()
            self._cursor.mark()

    def _call(self, forms: tuple[Calls, ...], letter: str, is_due: bool) -> Parsing[bool]:
        """Read a call; False if none comes. Raises Malformed where one is due."""
        if letter == "{" and isinstance(forms[0], JsonCalls) and forms[0].has_name_as_key:
            yield from self._json.read_keyed()
            return True
        if letter == "{":
            yield from self._json.read()
            return True
        for form in forms:
            match form:
                case NamedCalls() if form.opening or is_due:
                    if not form.opening or (yield from self._cursor.take((form.opening,))):
                        yield from self._reader.read_named(form)
                        return True
                case TaggedCalls() if form.opening or is_due:
                    if not form.opening or (yield from self._cursor.take((form.opening,))):
                        yield from self._reader.read_tagged(form)
                        return True
        if is_due:
            raise Malformed(f"{letter!r} where a call is due")
        return False


def _ignore(text: str) -> None:
    pass
