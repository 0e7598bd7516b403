"""Audio folders: `root/<class>/**/x.flac`, or all in one folder. See formats/audiofolder/MAPPING.md."""

from __future__ import annotations

from dataclasses import replace

from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.folders.audiofiles import ENCODINGS, audio_problem
from streamloader.conversion.sources.folders.classfolder import MediaFolder, Medium, open_classes
from streamloader.conversion.sources.wish import Wish

NAME = "audiofolder"
AUDIO = Medium("audio", "clip", ENCODINGS, audio_problem)


def matches(listing: Listing) -> bool:
    """Return whether some visible clip stands in the listing of a folder."""
    return listing.folder and bool(AUDIO.files(listing))


def open_source(listing: Listing, wish: Wish) -> MediaFolder:
    """Return the source; its rows are sorted by class, then by path.

    Clips right in the folder, and none below it, have no classes. Where a clip has a .txt of its name beside it, all
    must have one, unless the wish is without `text`. Raises `SourceError` for a class folder or a split without
    clips, or where there is no clip.
    """
    clips = AUDIO.files(listing)
    if clips and all("/" not in info.path for info in clips):
        source = MediaFolder(listing.store, listing.url, AUDIO, clips, len(listing.files) - len(clips))
    else:
        source = open_classes(listing, AUDIO)
    if not wish.wanted("text"):
        return source
    beside = {info.path[:-4]: info for info in listing.of("txt")}
    texts = tuple(beside.get(info.path.rpartition(".")[0]) for info in source.media)
    found = {info.path for info in texts if info is not None}
    return replace(source, texts=texts, passed_over=source.passed_over - len(found)) if found else source
