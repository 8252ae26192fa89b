"""The table of families in docs/models.md."""

import re

from octavo.worker_proc.models.registry import FAMILIES

_TABLE = re.compile(r"(<!-- families -->\n).*(\n<!-- end of families -->)", re.DOTALL)


def with_families(page: str) -> str:
    """Return docs/models.md with the table of all families between its marks."""
    rows = [
        "| family | `architectures` | file | features | cache groups | formats | compared with |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.architectures)
        path = f"[{family.module}.py](../worker_proc/models/{family.module}.py)"
        formats = ", ".join((family.formats, *family.quantizations))
        cells = (family.name, names, path, family.features, family.caches, formats, family.tested)
        rows.append(f"| {' | '.join(cells)} |")
    table = "\n".join(rows)
    return _TABLE.sub(lambda match: match[1] + table + match[2], page)
