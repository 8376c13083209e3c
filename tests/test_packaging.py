"""What an installed modpass holds."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_installed() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    tops = {"modpass": "modpass", "exporters": "modpass.exporters", "bench": "modpass.bench"}
    found = set()
    for top, name in tops.items():
        for file in (ROOT / top).rglob("__init__.py"):
            if not any(p.is_symlink() for p in file.parents):
                found.add(".".join([name, *file.parent.relative_to(ROOT / top).parts]))
    assert found == listed
