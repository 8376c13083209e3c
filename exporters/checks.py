"""Checks of one file after the other: the first that fails ends the series, for what follows would trust it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from modpass.errors import ModpassError, VerificationError

__all__ = ["Check", "NotRun", "Series", "Verdict"]

Result = Literal["passed", "failed", "not run"]


class NotRun(Exception):
    """A check that could not be made; says why."""


@dataclass(frozen=True)
class Check:
    """One check of one file, and what it found."""

    file: str
    name: str
    result: Result
    detail: str


@dataclass
class Series:
    """The checks of ``file``, in the order in which they may be trusted.

    >>> series = Series("m.onnx"); series.run("hashes", lambda: "3 files"); series.checks[0].result
    'passed'
    """

    file: str
    checks: list[Check] = field(default_factory=list)

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Make one check; it returns what it found, and raises a ``ModpassError`` where that is not right."""
        if any(c.result == "failed" for c in self.checks):
            self._note(name, "not run", "an earlier check failed")
            return
        try:
            self._note(name, "passed", check())
        except NotRun as e:
            self._note(name, "not run", str(e))
        except ModpassError as e:
            self._note(name, "failed", str(e))

    def _note(self, name: str, result: Result, detail: str) -> None:
        self.checks.append(Check(self.file, name, result, " ".join(detail.split())))


@dataclass(frozen=True)
class Verdict:
    """All checks, and what they come to."""

    checks: Sequence[Check]

    def count(self, result: Result) -> int:
        """How many checks ended so."""
        return sum(c.result == result for c in self.checks)

    def check(self) -> Verdict:
        """Return the verdict if every check that was made passed.

        Raises:
            VerificationError: one failed; the sentence is that of the first.

        >>> Verdict([Check("m.onnx", "hashes", "failed", "'m.onnx' has changed")]).check()
        Traceback (most recent call last):
        modpass.errors.VerificationError: 'm.onnx' has changed
        """
        failed = [c.detail for c in self.checks if c.result == "failed"]
        if failed:
            more = f" (and {len(failed) - 1} more)" if failed[1:] else ""
            raise VerificationError(f"{failed[0]}{more}")
        return self

    def __str__(self) -> str:
        files = len({c.file for c in self.checks} - {"."})
        left = f", {self.count('not run')} could not be made" if self.count("not run") else ""
        return f"sound: {self.count('passed')} checks of {files} file{'s' * (files > 1)} passed{left}"
