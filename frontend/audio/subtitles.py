"""Writes subtitles in the formats SubRip and WebVTT."""

import html
from collections.abc import Iterable

from octavo.frontend.audio.segments import Segment


def subrip(segments: Iterable[Segment]) -> str:
    """Return a SubRip file (`srt`)."""
    return "".join(
        f"{number}\n{_time(one.start_s, ',')} --> {_time(one.end_s, ',')}\n{one.text.strip()}\n\n"
        for number, one in enumerate(segments, 1)
    )


def webvtt(segments: Iterable[Segment]) -> str:
    """Return a WebVTT file; text that could be mistaken for markup or an arrow is escaped."""
    cues = (
        f"{_time(one.start_s, '.')} --> {_time(one.end_s, '.')}\n{html.escape(one.text.strip(), quote=False)}\n\n"
        for one in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _time(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(1000 * seconds), 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}{point}{milliseconds:03}"
