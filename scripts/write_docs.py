"""Writes the generated pages of docs/; a test compares them with what this would write."""

from pathlib import Path

from octavo.frontend.cli.config_docs import render_config_docs
from octavo.frontend.metrics.names import render_metrics_docs

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    for name, text in (("config.md", render_config_docs()), ("metrics.md", render_metrics_docs())):
        (DOCS / name).write_text(text, "utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
