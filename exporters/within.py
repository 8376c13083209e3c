"""Names in a manifest or a graph that may only mean files of one folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

from modpass.errors import VerificationError

__all__ = ["within"]


def within(folder: Path, name: str, said_by: str) -> Path:
    """The file ``name`` of ``folder``; ``said_by`` names what refers to it.

    Raises:
        VerificationError: the name is absolute or leads out of the folder, by ``..`` or by a symlink.

    >>> within(Path("model"), "../secrets", "'m.onnx'")
    Traceback (most recent call last):
    modpass.errors.VerificationError: 'm.onnx' names the file '../secrets', which leads out of the folder 'model'; ...
    """
    advice = "export it again, and load nothing from this folder until then"
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    outward = ".." in windows.parts or posix.is_absolute() or bool(windows.anchor)
    if not name or "\0" in name or outward:
        raise VerificationError(
            f"{said_by} names the file '{name!s}', which leads out of the folder '{folder}'; {advice}"
        )
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of symlinks
        inside = False
    if not inside:
        raise VerificationError(f"{said_by} names '{name}', a symlink out of the folder '{folder}'; {advice}")
    return path
