"""The tables of families in docs/models.md and docs/multimodal.md."""

import re
from collections.abc import Iterator

from octavo.worker_proc.models.media_families import MEDIA_FAMILIES
from octavo.worker_proc.models.registry import FAMILIES, Family
from octavo.worker_proc.weights import gguf_names, mistral

_TABLE = re.compile(r"(<!-- families -->\n).*(\n<!-- end of families -->)", re.DOTALL)


_FALLBACK = (
    "| others | as in `transformers` | fallback | [fallback/](../worker_proc/models/fallback/) "
    "| [see below](#through-transformers) | by layer | safetensors, pt | `transformers` |"
)


def with_families(page: str) -> str:
    """Return docs/models.md with the table of all families between its marks."""
    rows = [
        "| family | `architectures` | runs | file | features | cache groups | formats | compared with |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.architectures)
        path = f"[{family.module}.py](../worker_proc/models/{family.module}.py)"
        formats = ", ".join(_formats(family))
        cells = (family.name, names, "native", path, family.features, family.caches, formats, family.tested)
        rows.append(f"| {' | '.join(cells)} |")
    rows.append(_FALLBACK)
    return _with_table(page, rows)


def with_media_families(page: str) -> str:
    """Return docs/multimodal.md with the table of all models that read media between its marks."""
    rows = [
        "| model | `architectures` | reads | encoder | language model |",
        "| --- | --- | --- | --- | --- |",
    ]
    for family in MEDIA_FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.architectures)
        kinds = ", ".join({"image": "images", "video": "videos", "audio": "audio"}[kind] for kind in family.kinds)
        rows.append(f"| {family.name} | {names} | {kinds} | {family.tower} | {family.text} |")
    return _with_table(page, rows)


def _with_table(page: str, rows: list[str]) -> str:
    table = "\n".join(rows)
    return _TABLE.sub(lambda match: match[1] + table + match[2], page)


def _formats(family: Family) -> Iterator[str]:
    """Yield the formats in which weights of a family are read; tests compare each with safetensors."""
    yield "safetensors"
    yield "pt"
    if gguf_names.SUPPORTED_ARCHITECTURES.intersection(family.architectures):
        yield "GGUF"
    if mistral.SUPPORTED_ARCHITECTURES.intersection(family.architectures):
        yield "mistral"
