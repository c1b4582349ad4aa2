"""Ctrl-C where Python can only print an exception: in ctypes callbacks, __del__, weakref callbacks.

The KeyboardInterrupt is lost there and the run would go on, so it is sent again.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from queue import SimpleQueue

_PAUSE_SECONDS = 0.02
"""The callback has most often been left by then; if not, the interrupt is sent once more."""


def send_dropped_interrupts_again() -> None:
    """From now on; other exceptions that are dropped are told as before."""
    tell = sys.unraisablehook
    dropped: SimpleQueue[None] = SimpleQueue()  # one step: an interrupt may come here, too

    def note(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            dropped.put(None)
        else:
            tell(unraisable)

    def send() -> None:
        main = threading.main_thread().ident
        while main is not None:
            dropped.get()
            time.sleep(_PAUSE_SECONDS)
            signal.pthread_kill(main, signal.SIGINT)  # ends a wait of the main thread as well

    threading.Thread(target=send, name="specdec-interrupts", daemon=True).start()
    sys.unraisablehook = note
