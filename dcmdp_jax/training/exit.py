"""Leaving a run together: signals, and the exit that all processes take at one step."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

import jax

from dcmdp_jax.activity import give_back_terminal
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.errors import UserError
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.rewards.protocol import RewardError

_TWICE_S = 1.0
"""Signals that come within this time are one."""
_UNSEEN_S = 2.0
"""Time after which a signal that the run did not look for ends it, where nothing is lost."""
ENDS_A_RUN = EngineError, MemoryError, jax.errors.JaxRuntimeError
"""Errors after which the finished steps are saved."""


class Interrupted(Exception):
    """A signal ended the run. Finished steps are saved; the next run repeats the unfinished one."""

    def __init__(self, signal_number: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} {where}")
        self.signal_number = signal_number


class ExitRequested(Exception):
    """This process or another one was asked to stop. Its own work ends here."""


@dataclasses.dataclass(eq=False)
class CollectiveExit:
    """Scope of per-process work; a signal or failure in one process ends it in all.

    Attributes:
        hosts: the processes.
        stop: knows of a signal to this one.
        save: saves the state after the last finished step, and returns that step once it is on
            disk. Collective.
    """

    hosts: Hosts
    stop: "StopSignal"
    save: Callable[[], int]

    def check(self) -> None:
        """Raise `ExitRequested`, within `scope`, if a signal came, here or to another process."""
        if self.stop.received is not None or self.hosts.interrupted:
            raise ExitRequested

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Run a block without other processes; leave it with them.

        After a signal to any of them, or the failure of an engine or of a reward function, all save
        what is finished and end the run.

        Raises:
            Interrupted, UserError, EngineError, MemoryError, JaxRuntimeError: the same on all
                processes, or what ended the run on another one.
        """
        failure: Exception | None = None
        try:
            yield
        except ExitRequested:
            self.hosts.interrupt_all()
        except (RewardError, *ENDS_A_RUN) as error:
            failure = error
            self.hosts.interrupt_all()

        broken = isinstance(failure, ENDS_A_RUN)
        signal_number, any_failure, any_broken = self.hosts.largest(
            self.stop.received or 0, failure is not None, broken
        )
        if not signal_number and not any_failure:
            return
        if broken and self.hosts.count == 1:
            raise failure
        step = self.save()
        if broken:
            raise failure
        if any_broken:
            raise EngineError("the engine failed on another host; see its log")
        if signal_number:
            raise Interrupted(int(signal_number), f"after step {step}, saved")
        raise UserError(
            f"config.rewards.functions: {failure or 'one failed on another host'}; saved after "
            f"step {step}: fix the function and rerun the same command, or set "
            "rewards.on_error=none to ignore its failures (time limit: rewards.timeout)"
        ) from failure


class ThreadExit:
    """Exit of work in a thread, for which the main thread waits within its own `scope`.

    Attributes:
        cancelled: set to end the thread's work.
    """

    def __init__(self, leave: CollectiveExit) -> None:
        self._exit = leave
        self.cancelled = threading.Event()

    def check(self) -> None:
        """Raise `ExitRequested` if the thread is to end, too."""
        if self.cancelled.is_set():
            raise ExitRequested
        self._exit.check()

    def scope(self) -> contextlib.nullcontext[None]:
        """Run a block; nothing collective is called."""
        return contextlib.nullcontext()


class StopSignal:
    """Records SIGTERM, SIGINT and SIGHUP; the run polls for them at safe points.

    The first is answered on the console at once, also while a compiled program runs. A second one,
    more than a second later (`timeout` sends one twice), ends the process: what was saved stays,
    and nothing more is saved. So does the first one if the run has not looked at it for two
    seconds, as it compiles, and `nothing_to_lose()` is true.
    """

    def __init__(self, *, nothing_to_lose: bool = False) -> None:
        self._received: int | None = None
        self._looked = False
        self.nothing_to_lose: Callable[[], bool] = lambda: nothing_to_lose

    @property
    def received(self) -> int | None:
        """The signal, for the run to look at; None before one came."""
        self._looked = self._received is not None
        return self._received

    def _note(self, number: int, _: FrameType | None) -> None:
        self._received = number

    def _leave_unseen(self, number: int) -> None:
        if not self._looked and self.nothing_to_lose():
            self._leave(number, "it compiles, and nothing is lost")

    def _leave(self, number: int, why: str) -> NoReturn:
        give_back_terminal()
        _say(f"{why}: leaves at once; the same command resumes from the newest checkpoint")
        os._exit(128 + number)

    def _answer(self, pipe: int, numbers: list[int]) -> None:
        """Answer signals as Python's handler writes them to the pipe, until that closes."""
        answered = None
        while True:
            received = os.read(pipe, 1)
            if not received:
                return
            number = received[0]
            if number not in numbers or (answered and time.monotonic() - answered < _TWICE_S):
                continue
            name = signal.Signals(number).name
            if answered:
                self._leave(number, f"{name} again")
            answered = time.monotonic()
            timer = threading.Timer(_UNSEEN_S, self._leave_unseen, (number,))
            timer.daemon = True
            timer.start()
            _say(f"{name}: ends what it is doing, saves and leaves; a second {name} leaves at once")

    @contextlib.contextmanager
    def listening(self) -> "Iterator[StopSignal]":
        """Install the handlers for the block.

        Outside the main thread Python gives no signal, and this does nothing. A SIGHUP that is
        ignored, as nohup has it, stays ignored: the run goes on without its terminal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)

        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        watcher = threading.Thread(
            target=self._answer,
            args=(read_end, numbers),
            daemon=True,
            name="signals",
        )
        watcher.start()
        wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(write_end)
            watcher.join()
            os.close(read_end)


def _say(line: str) -> None:
    """Write a line on the console, whatever the main thread is in the middle of writing."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{line}\n".encode())
