"""The engine's side: a loop that runs the requests of the server's process on one LLM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from offload.process.memory import process_memory
from specdec.api import LLM
from specdec.async_llm import AsyncLLM
from specdec.grammar.constraint import Constraint
from specdec.grammar.trial import check_cost, end_trials
from specdec.metrics.stats import EngineStats
from specdec.planning.run_plan import RunPlan
from specdec.serve.errors import ApiError, draining
from specdec.serve.jobs import Job, request_constraint, request_job
from specdec.serve.options import ServeOptions
from specdec.serve.process.generation import Generation
from specdec.serve.process.messages import (
    AskBeat,
    Beat,
    Cancel,
    Compute,
    Ended,
    Failed,
    Generate,
    Loaded,
    MessageSocket,
    Output,
    Planned,
    ServedModel,
    ServerGone,
    Taken,
    unpickled,
)
from specdec.serve.process.translation import Log, translated
from specdec.serve.sse import made_in

BEAT_SECONDS = 1.0


class EngineHost:
    """One LLM for the requests that come over a socket."""

    def __init__(self, socket: MessageSocket, options: ServeOptions, log: Log) -> None:
        self.socket, self.options, self.log = socket, options, log
        self.llm: AsyncLLM | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._generations: dict[int, Generation] = {}
        # Long prompts are encoded beside the event loop. One thread: a tokenizer may not be
        # thread-safe, and a body that is parsed takes ten times its bytes.
        self._encoder = ThreadPoolExecutor(1, "specdec-encode")
        # An invalid schema may take seconds to be refused: only requests with a schema wait for it.
        self._trials = ThreadPoolExecutor(1, "specdec-trial")
        self._is_over = False
        self._sent_plan: RunPlan | None = None

    def start(self) -> None:
        """Begin to give signs of life; the server alone gets the terminal's signals and SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Its warnings quote clients' schemas.
        logging.getLogger("specdec.grammar").setLevel(logging.ERROR)
        threading.Thread(target=self._beat, name="specdec-beat", daemon=True).start()

    def run(self, llm: LLM) -> None:
        """Run requests until the server closes the socket."""
        asyncio.run(self._run(llm))

    async def _run(self, llm: LLM) -> None:
        self.llm = AsyncLLM(llm)
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._receive, name="specdec-receive", daemon=True).start()
        self._sent_plan = llm.plan
        self.socket.send(Loaded(served_model(llm)))
        await self._end.wait()
        self.end_trials()
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def end_trials(self) -> None:
        """Try no more schemas: the process would wait for that thread."""
        self._is_over = True
        end_trials()

    # --- threads -------------------------------------------------------------------------------

    def _beat(self) -> None:
        try:
            while self._is_over or not self._has_lost_its_model:
                self.send_beat()
                time.sleep(BEAT_SECONDS)
            self.log.say("error: the engine's thread has ended")
        except ServerGone:  # nobody waits for anything here
            pass
        os._exit(1)

    @property
    def _has_lost_its_model(self) -> bool:
        """Whether the engine's thread ended by a fault of its own."""
        return self.llm is not None and self.llm.llm.session.engine.is_closing

    def send_beat(self) -> None:
        if self.llm is not None:
            self._send_plan(self.llm.llm)
        stats = EngineStats() if self.llm is None else self.llm.llm.stats
        self.socket.send(Beat(stats, process_memory().rss_bytes))

    def _send_plan(self, llm: LLM) -> None:
        """Send the plan if it is another one than the server has. Any thread may call it."""
        plan, sent = llm.plan, self._sent_plan
        if sent is not None and plan is not sent:
            self._sent_plan = plan
            self.socket.send(Planned(plan.to_dict()))

    def _receive(self) -> None:
        try:
            while True:
                message = self.socket.receive()
                if isinstance(message, AskBeat):
                    self.send_beat()
                else:
                    self._loop.call_soon_threadsafe(self._take, message)
                del message
        except ServerGone:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._end.set)

    # --- requests ------------------------------------------------------------------------------

    def _take(self, message: Generate | Compute | Cancel | Taken) -> None:
        if isinstance(message, Generate | Compute):
            self._begin(message)
        elif message.id not in self._tasks:  # it has ended meanwhile
            return
        elif isinstance(message, Cancel):
            self._tasks[message.id].cancel()
        else:
            self._generations[message.id].take(message.num_values)

    def _begin(self, message: Generate | Compute) -> None:
        id, llm = message.id, self.llm
        assert llm is not None, "requests come once it is loaded"

        def fail(error: ApiError, is_storage: bool) -> None:
            self.socket.send(Failed(id, error, is_storage))

        generation = self._generations[id] = Generation(id, llm, self.socket, fail, self.log)
        if isinstance(message, Generate):
            work = generation.run(lambda: self.job(message.form, llm.llm))
        else:
            work = self._compute(message, llm.llm, fail)

        def end(_: asyncio.Task[None]) -> None:
            del self._tasks[id], self._generations[id]
            with suppress(ServerGone):
                self.socket.send(Ended(id, generation.stats))

        task = self._tasks[id] = self._loop.create_task(work)
        task.add_done_callback(end)  # comes also if the task is cancelled before it has begun

    async def _compute(self, message: Compute, llm: LLM, fail: Any) -> None:
        with translated(fail, self.log):
            result = await made_in(
                self._encoder, lambda: message.function(unpickled(message.form), llm)
            )
            self._send_plan(llm)
            self.socket.send(Output(message.id, result))

    async def job(self, form: bytes, llm: LLM) -> Job:
        """Return the job of a pickled request. Raises ApiError, SpecdecError."""
        constraint = await made_in(self._encoder, lambda: request_constraint(unpickled(form)))
        if constraint is not None:
            await made_in(self._trials, self._try, constraint)
        return await made_in(self._encoder, lambda: request_job(unpickled(form), llm, self.options))

    def _try(self, constraint: Constraint) -> None:
        """Try a constraint. Raises ConfigError, and ApiError while the engine ends."""
        try:
            if not self._is_over:
                check_cost(constraint)
        finally:
            if self._is_over:  # the trial may have been interrupted: ignore its outcome
                raise draining()


def served_model(llm: LLM) -> ServedModel:
    tokenizer, options = llm.tokenizer, llm.session.options
    form, special = tokenizer.chat_format, tokenizer.template_tokens
    ends = [tokenizer.token_name(i) for i in tokenizer.eos_token_ids]
    return ServedModel(
        plan=llm.plan.to_dict(),
        max_context=llm.max_context,
        num_slots=options.parallel or 1,
        # A template was named, or the model has one; else prompts are plain transcripts.
        has_chat_template=options.chat_template is not None or tokenizer.has_chat_template,
        knows_tools=form.knows_tools,
        chat_template=form.template or "",
        bos_token=str(special.get("bos_token") or ""),
        eos_token=str(special.get("eos_token") or next(iter(ends), "")),
    )
