"""The one place that knows how TensorRT 10, TensorRT 11 and TensorRT-RTX differ in their Python API.

Enum values moved between the majors (STRONGLY_TYPED is 1 in 10.x and 0 in 11.x), so everything is asked
for by name. TensorRT returns None or False where Python would raise; each such place is turned into a
BuildError here or in `tensorrt.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from modpass.errors import BuildError, InputError, require

__all__ = ["FLAVORS", "Flavor", "Log", "TensorRT", "find", "load", "parse_capability"]


@dataclass(frozen=True)
class Flavor:
    """One TensorRT product: its Python module, the extra that installs it, and what it builds for.

    ``capabilities`` are the compute capabilities it can be asked for; empty: the GPU of this machine.
    """

    name: str
    module: str
    extra: str
    title: str
    capabilities: tuple[str, ...] = ()


FLAVORS = {
    "tensorrt-rtx": Flavor(
        "tensorrt-rtx", "tensorrt_rtx", "tensorrt-rtx", "TensorRT-RTX",
        ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"),
    ),
    "tensorrt": Flavor("tensorrt", "tensorrt", "tensorrt", "TensorRT"),
}  # fmt: skip


@dataclass
class Log:
    """What TensorRT said, as (severity name, message), newest last."""

    messages: list[tuple[str, str]] = field(default_factory=list)

    def first_error(self) -> str | None:
        """The first error, which is the cause; later ones follow from it.

        >>> Log([("WARNING", "slow"), ("ERROR", "K exceeds"), ("ERROR", "no engine")]).first_error()
        'K exceeds'
        """
        errors = (text for severity, text in self.messages if severity in ("ERROR", "INTERNAL_ERROR"))
        return next(errors, None)


# TensorRT keeps the first logger of a process and ignores later ones, so there is one per flavour.
_LOGGERS: dict[str, tuple[Any, Log]] = {}


@dataclass(frozen=True)
class TensorRT:
    """One imported TensorRT module behind names that do not change between versions."""

    flavor: Flavor
    module: Any
    logger: Any
    log: Log

    @property
    def version(self) -> str:
        """Version of the imported module."""
        return str(self.module.__version__)

    def builder(self) -> Any:
        """A builder.

        Raises:
            BuildError: TensorRT made none, as full TensorRT does where there is no GPU.
        """
        self.log.messages.clear()
        try:
            return self._made(self.module.Builder(self.logger), "builder")
        except (TypeError, RuntimeError) as e:  # pybind11 turns a null pointer into TypeError
            raise BuildError(self._sentence("builder")) from e

    def network(self, builder: Any) -> Any:
        """A strongly typed network: precision is what the ONNX graph says.

        Raises:
            BuildError: TensorRT made none.
        """
        flags = self.module.NetworkDefinitionCreationFlag
        typed = getattr(flags, "STRONGLY_TYPED", None)  # a version without the flag has no other kind
        bits = 0 if typed is None else 1 << int(typed)
        return self._made(builder.create_network(bits), "network")

    def parser(self, network: Any) -> Any:
        """An ONNX parser that fills ``network``."""
        return self._made(self.module.OnnxParser(network, self.logger), "ONNX parser")

    def config(self, builder: Any) -> Any:
        """A builder configuration."""
        return self._made(builder.create_builder_config(), "builder configuration")

    def target(self, config: Any, capabilities: Sequence[str]) -> None:
        """Build for each of ``capabilities``; full TensorRT always builds for the GPU of this machine.

        Raises:
            BuildError: this TensorRT does not know one.
        """
        if not self.flavor.capabilities:
            return
        known = self.module.ComputeCapability.__members__
        config.num_compute_capabilities = len(capabilities)
        for i, capability in enumerate(capabilities):
            name = "SM" + capability.replace(".", "")
            if name not in known:
                raise BuildError(
                    f"{self.flavor.title} {self.version} has no compute capability {capability}; it has "
                    f"{', '.join(sorted(n for n in known if n.startswith('SM')))}"
                )
            if config.set_compute_capability(known[name], i) is False:
                raise BuildError(self._sentence(f"target {name}"))

    def flag(self, config: Any, name: str) -> None:
        """Set a builder flag by its name.

        Raises:
            BuildError: this TensorRT has no such flag.
        """
        if name not in self.module.BuilderFlag.__members__:
            raise BuildError(f"{self.flavor.title} {self.version} has no builder flag {name}; build without it")
        config.set_flag(self.module.BuilderFlag.__members__[name])

    def verbosity(self, config: Any, name: str) -> None:
        """Let the engine tell so much of its layers."""
        config.profiling_verbosity = self.module.ProfilingVerbosity.__members__[name.upper()]

    def workspace(self, config: Any, size: int) -> None:
        """Allow ``size`` bytes of scratch memory."""
        config.set_memory_pool_limit(self.module.MemoryPoolType.WORKSPACE, size)

    def timing_cache(self, config: Any, content: bytes) -> Any:
        """Attach a timing cache made from ``content`` (empty bytes: a fresh one) and return it.

        Raises:
            BuildError: TensorRT does not accept the content, for instance that of another version or GPU.
        """
        cache = self._made(config.create_timing_cache(content), "timing cache")
        if config.set_timing_cache(cache, ignore_mismatch=False) is False:
            raise BuildError(self._sentence("timing cache for this GPU and version"))
        return cache

    def _made(self, thing: Any, what: str) -> Any:
        if thing is None:
            raise BuildError(self._sentence(what))
        return thing

    def _sentence(self, what: str) -> str:
        said = self.log.first_error() or "it gave no reason; full TensorRT needs an NVIDIA GPU and its driver"
        return f"{self.flavor.title} {self.version} made no {what}: {said}"


def load(flavor: str) -> TensorRT:
    """Import the TensorRT of ``flavor``.

    Raises:
        InputError: no such flavour.
        MissingExtraError: the package is not installed; the message says how to install it.
    """
    facts = find(flavor)
    module = require(facts.module, facts.extra)
    if flavor not in _LOGGERS:
        log = Log()
        _LOGGERS[flavor] = (_make_logger(module, log), log)
    logger, log = _LOGGERS[flavor]
    return TensorRT(facts, module, logger, log)


def find(flavor: str) -> Flavor:
    """The flavour of that name.

    Raises:
        InputError: no such flavour.

    >>> find("tensorrt").module
    'tensorrt'
    """
    if flavor not in FLAVORS:
        raise InputError(f"flavor is '{flavor}', allowed are: {', '.join(FLAVORS)}")
    return FLAVORS[flavor]


def parse_capability(text: str) -> tuple[int, int]:
    """Split a CUDA compute capability.

    Raises:
        InputError: not of the form ``major.minor``.

    >>> parse_capability("8.9")
    (8, 9)
    """
    if not (match := re.fullmatch(r"(\d{1,2})\.(\d)", text)):
        raise InputError(f"compute_capability is '{text}', it must look like '8.9' (major.minor)")
    return int(match[1]), int(match[2])


def _make_logger(module: ModuleType, log: Log) -> Any:
    class Capture(module.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)  # pybind11 refuses an instance whose base was not constructed

        def log(self, severity: Any, message: str) -> None:
            log.messages.append((getattr(severity, "name", str(severity)), message))

    return Capture()
