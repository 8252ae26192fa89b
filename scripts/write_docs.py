"""Writes the generated pages of docs/; a test fails if a page is not up to date."""

from pathlib import Path

from octavo.frontend.cli.config_docs import render_config_docs
from octavo.frontend.cli.sampling_docs import render_sampling_docs
from octavo.frontend.metrics.names import render_metrics_docs
from octavo.worker_proc.models.docs import with_families, with_media_families

DOCS = Path(__file__).resolve().parent.parent / "docs"

PAGES = {
    "config.md": render_config_docs,
    "metrics.md": render_metrics_docs,
    "sampling-parameters.md": render_sampling_docs,
}

TABLES = {"models.md": with_families, "multimodal.md": with_media_families}


def main() -> None:
    for name, with_table in TABLES.items():
        page = DOCS / name
        page.write_text(with_table(page.read_text("utf-8")), "utf-8")
    for name, render in PAGES.items():
        (DOCS / name).write_text(render(), "utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
