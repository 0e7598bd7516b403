"""Audio folders: `root/<class>/**/x.flac`, or all in one folder. See formats/audiofolder/MAPPING.md."""

from __future__ import annotations

from dataclasses import replace

from streamloader.conversion.sources.files import Listing, hidden
from streamloader.conversion.sources.folders.audiofiles import ENCODINGS, audio_problem
from streamloader.conversion.sources.folders.classfolder import MediaFolder, Medium, open_classes
from streamloader.conversion.sources.wish import Wish

NAME = "audiofolder"
AUDIO = Medium("audio", "clip", ENCODINGS, audio_problem)


def matches(listing: Listing) -> bool:
    """Return whether some visible clip stands in the listing of a folder."""
    return listing.folder and any(AUDIO.fits(info.path) for info in listing.files)


def open_source(listing: Listing, wish: Wish) -> MediaFolder:
    """Return the source; its rows are sorted by class, then by path.

    Clips right in the folder, and none below it, have no classes. Where a clip has a .txt of its name beside it, all
    must have one, unless the wish is without `text`. Raises `SourceError` for a class folder without clips, for clips
    outside one where there are some, or where there is no clip.
    """
    clips = tuple(info for info in listing.files if AUDIO.fits(info.path))
    if clips and all("/" not in info.path for info in clips):
        source = MediaFolder(listing.store, listing.url, AUDIO, clips, len(listing.files) - len(clips))
    else:
        source = open_classes(listing, AUDIO)
    if not wish.wanted("text"):
        return source
    beside = {info.path[:-4]: info for info in listing.files if info.path[-4:].lower() == ".txt"}
    texts = tuple(beside.get(info.path.rpartition(".")[0]) for info in source.media)
    texts = tuple(info if info is not None and not hidden(info.path) else None for info in texts)
    found = {info.path for info in texts if info is not None}
    return replace(source, texts=texts, passed_over=source.passed_over - len(found)) if found else source
