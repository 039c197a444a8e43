"""Payloads on devices, watched beyond the end of their calls in memory of the host alone.

A call with gradients on a device returns while its collectives still run. Behind them, the stream of the device copies
the number of the call to a word of pinned memory. The watchdog reads this word. It never calls the driver, which may
block while another thread of the process waits in it.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

import torch

from legacy_ddp._torch import device as devices

# Words of a device. Two calls on different streams may complete in another order, so they need different words.
_RING_SIZE = 16
# Pause between two looks at a payload that was reported: its completion is worth a line.
_LOOK_AGAIN_SECONDS = 1.0


class Progress(IntEnum):
    NOT_BEGUN = auto()
    ISSUING = auto()  # the host is inside of the collectives, for example because the backend connects the devices
    RUNNING = auto()
    COMPLETE = auto()


@dataclass(frozen=True)
class PayloadState:
    """The payloads of a rank, numbered by the calls on the group.

    ``begun``, ``issued``: the newest; ``complete``: the newest up to which all are complete. ``serial``, ``call``,
    ``devices``, ``seconds``: the oldest that is not complete. ``is_late``: this one is worth a report.
    """

    begun: int = 0
    issued: int = 0
    complete: int = 0
    serial: int = 0
    call: str = ""
    devices: str = ""
    seconds: float = 0.0
    is_late: bool = False

    def progress(self, serial: int) -> Progress:
        reached = (serial <= self.begun) + (serial <= self.issued) + (serial <= self.complete)
        return Progress(Progress.NOT_BEGUN + reached)


@dataclass
class Payload:
    """The payload of a call. ``words``: empty until it is issued. ``is_told``: this rank has logged the report."""

    serial: int
    call: str
    devices: Sequence[torch.device]
    begun_at: float
    words: Sequence[torch.Tensor] = ()
    is_reported: bool = False
    is_told: bool = False

    def is_complete(self) -> bool:
        """Whether all devices have written this call, or a later one, to their words."""
        return bool(self.words) and all(int(word) >= self.serial for word in self.words)


class PayloadWatch:
    """The payloads of one rank that may still run. The training thread adds them, the watchdog's threads look."""

    def __init__(self, warn_after_seconds: float) -> None:
        self._warn_after_seconds = warn_after_seconds
        self._words: dict[torch.device, Sequence[torch.Tensor]] = {}
        self._payloads: deque[Payload] = deque()  # the oldest first
        self._begun = self._issued = 0
        self._advanced_at = 0.0  # when a payload was last seen complete
        self._lock = threading.Lock()

    @property
    def is_used(self) -> bool:
        """Whether there was ever a payload on a device."""
        return self._begun > 0

    def begin(self, serial: int, call: str, places: Sequence[torch.device]) -> None:
        """The host begins to issue the payload of call ``serial`` on the devices ``places``."""
        with self._lock:
            # Without those that were reported: their end is worth a line, see take_completed().
            while self._payloads and not self._payloads[0].is_reported and self._drop_complete():
                pass
            self._payloads.append(Payload(serial, call, places, time.monotonic()))
            self._begun = serial

    def issue(self) -> None:
        """The payload is issued: let each device write its number, behind the payload. The host does not wait."""
        payload = self._payloads[-1]
        words = [self._word(place, payload.serial) for place in payload.devices]
        for place, word in zip(payload.devices, words, strict=True):
            # A tensor of its own per call: the next call may use another stream.
            word.copy_(torch.full((), payload.serial, dtype=torch.int32, device=place), non_blocking=True)
        with self._lock:
            payload.words = words
            self._issued = payload.serial

    def drop_failed(self) -> None:
        """The call has failed: drop its payload if it was not issued."""
        with self._lock:
            if self._payloads and not self._payloads[-1].words:
                self._begun = self._issued
                self._payloads.pop()

    def take_late(self) -> Payload | None:
        """The payload to report now, once each. Only the oldest: later ones wait for it."""
        with self._lock:
            oldest = self._oldest()
            if oldest is None or oldest.is_reported or self._age(oldest) < self._warn_after_seconds:
                return None
            oldest.is_reported = True
            return oldest

    def take_completed(self) -> list[Payload]:
        with self._lock:
            completed = []
            while oldest := self._drop_complete():
                completed += [oldest] * oldest.is_reported
            return completed

    def seconds_to_look(self) -> float | None:
        """Seconds until a payload may be late; None before the first payload.

        A payload that begins meanwhile is not late before.
        """
        with self._lock:
            if not self.is_used:
                return None
            oldest = self._oldest()
            if oldest is None:
                return self._warn_after_seconds
            if oldest.is_reported:
                return _LOOK_AGAIN_SECONDS
            return max(0.0, self._warn_after_seconds - self._age(oldest))

    def state(self) -> PayloadState:
        with self._lock:
            oldest = self._oldest()
            if oldest is None:
                return PayloadState(self._begun, self._issued, complete=self._issued)
            return PayloadState(
                self._begun,
                self._issued,
                complete=oldest.serial - 1,
                serial=oldest.serial,
                call=oldest.call,
                devices=", ".join(map(str, oldest.devices)),
                seconds=self._age(oldest),
                is_late=oldest.is_reported,
            )

    def _oldest(self) -> Payload | None:
        return next((payload for payload in self._payloads if not payload.is_complete()), None)

    def _age(self, oldest: Payload) -> float:
        """Seconds since the payload began, or since an earlier one was seen complete: the host may be far ahead."""
        return time.monotonic() - max(oldest.begun_at, self._advanced_at)

    def _drop_complete(self) -> Payload | None:
        if not (self._payloads and self._payloads[0].is_complete()):
            return None
        self._advanced_at = time.monotonic()
        return self._payloads.popleft()

    def _word(self, place: torch.device, serial: int) -> torch.Tensor:
        if place not in self._words:
            with torch.inference_mode(False):  # otherwise only inference mode could write to it
                self._words[place] = devices.host_numbers(_RING_SIZE, place).unbind()
        return self._words[place][serial % _RING_SIZE]
