"""Files and folders are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modpass.errors import StateError
from modpass.files import whole_directory


@pytest.mark.parametrize("older", [True, False])
def test_of_two_folders_written_at_once_the_first_stays_whole(
    older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "folder"
    if older:
        target.mkdir()
        (target / "older").write_text("")
    replace = os.replace

    def meanwhile(source: Path, place: Path) -> None:
        """The other run writes between the two steps of the swap."""
        if place == target:
            target.mkdir()
            (target / "other").write_text("")
        replace(source, place)

    monkeypatch.setattr(os, "replace", meanwhile)
    with pytest.raises(StateError, match=r"folder' was written by another run meanwhile"), whole_directory(target) as f:
        (f / "mine").write_text("")
    assert [p.name for p in target.iterdir()] == ["other"]
