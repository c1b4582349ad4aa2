"""The loop of a conversation: read a message, answer it."""

from __future__ import annotations

from specdec.cli.chat.answers import Chat
from specdec.cli.chat.commands import Leave, run_command
from specdec.cli.chat.conversation import ConversationError
from specdec.cli.chat.editor import MessageReader
from specdec.cli.options import OptionError


def converse(chat: Chat, reader: MessageReader) -> None:
    """Answer messages and run commands until the user leaves, or until the end of input."""
    from specdec.engine.many_prompts import REQUEST_ERRORS

    while (text := reader.read()) is not None:
        try:
            if not run_command(chat, text):
                chat.conversation.ask(text.removeprefix(" ") if text.startswith(" /") else text)
                chat.answer()
        except Leave:
            return
        except (OptionError, ConversationError, *REQUEST_ERRORS) as error:  # of a command
            chat.report(error)
