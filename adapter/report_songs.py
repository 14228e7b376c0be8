"""The songs that `report` is asked for: files, the audio files of directories, URLs."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from adapter.errors import SettingsError

# What directories are searched for; a file that is named itself may be called anything.
AUDIO_SUFFIXES = frozenset({
    ".aac", ".ac3", ".aif", ".aiff", ".alac", ".amr", ".ape", ".au", ".caf", ".dsf", ".flac",
    ".m4a", ".m4b", ".mka", ".mp2", ".mp3", ".mp4", ".mpc", ".oga", ".ogg", ".opus", ".rf64",
    ".spx", ".tta", ".w64", ".wav", ".webm", ".wma", ".wv",
})  # fmt: skip

_URL = re.compile("https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Song:
    """`name` is what was given, or a path under it; `path` is None for a URL."""

    name: str
    path: Path | None = None


def find_songs(given: Sequence[str]) -> list[Song]:
    """The songs of the arguments, each path and URL once, in their order.

    A directory gives its audio files, recursively and sorted, without hidden ones and without
    following links to directories. Raises SettingsError for what is not there, and for a directory
    without any.
    """
    songs = [song for one in given for song in _songs(one)]
    return list(dict.fromkeys(songs))


def digest(file: BufferedReader) -> str:
    """The hex SHA-256 of a file, from its beginning to its end; back at its beginning then."""
    file.seek(0)
    hexadecimal = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    return hexadecimal


def _songs(given: str) -> list[Song]:
    if _URL.match(given):
        return [Song(given)]
    path = Path(given)
    if given and path.is_dir():  # "" is a variable that nobody set, not this directory
        songs = [Song(_name(file), file) for file in sorted(_audio_files(path))]
        if not songs:
            raise SettingsError(f"{given!r}: there are no audio files in this directory")
        return songs
    if not given or not path.is_file():
        raise SettingsError(f"{given!r}: expected a file, a directory or an http(s) URL")
    return [Song(_name(path), path)]


def _audio_files(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            # Hidden ones are other systems' notes: "._song.mp3" is no song.
            if path.suffix.lower() not in AUDIO_SUFFIXES or name.startswith("."):
                continue
            if path.is_file() or not path.exists():  # no pipe or device, which may have no end
                yield path


def _name(path: Path) -> str:
    """A name that is no UTF-8 would make a line that is no JSON elsewhere."""
    return os.fsencode(path).decode("utf-8", "replace")
