"""Takes the pictures of the page at `/` for docs/images/, in Chromium, from a server of the default model."""

import argparse
import base64
import concurrent.futures
import tempfile
from pathlib import Path

import fetch_default_model
import httpx
from browser import Browser, browser
from own_server import serving

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
FLAGS = ("--served-model-name", "SmolLM2-135M-Instruct", "--max-model-len", "2048", "--kv-cache-memory-bytes", "128M")
WIDTH, HEIGHT = 1140, 760
NUM_STREAMS, STREAM_TOKENS = 10, 480
SCALE = 0.62  # of the pictures that are side by side
LOAD_TIMEOUT_S = 240.0
QUESTION = "Why is the sea salty? Answer in two sentences."


def main() -> None:
    """Write chat.webp, compare.webp, engine.webp, and first-screen.webp with two of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", type=Path, default=IMAGES, help="directory for the pictures; default: docs/images"
    )
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    with serving(str(fetch_default_model.fetch()), FLAGS) as (url, _), browser() as page:
        _chat(page, url, directory / "chat.webp")
        _compare(page, url, directory / "compare.webp")
        _engine(page, url, directory / "engine.webp")
        _side_by_side(page, [directory / "compare.webp", directory / "engine.webp"], directory / "first-screen.webp")
        if page.problems:
            raise SystemExit(f"the page has problems: {page.problems}")


def _open(page: Browser, url: str, view: str) -> None:
    page.open(f"{url}/?{view}#{view}", width=WIDTH, height=HEIGHT)
    page.wait_for("document.querySelector('#model')?.value")


def _fill(page: Browser, selector: str, value: str) -> None:
    page.run(f"document.querySelector({selector!r}).value = {value!r}")


def _chat(page: Browser, url: str, path: Path) -> None:
    _open(page, url, "chat")
    for name, value in (("temperature", "0.6"), ("max_tokens", "90"), ("seed", "7")):
        _fill(page, f"#{name}", value)
    page.run("document.querySelector('#logprobs').click()")
    page.run("document.querySelector('#receipts').click()")
    page.type_into("#input", QUESTION)
    page.press_enter()
    page.wait_for("document.querySelector('.message.assistant .save') !== null")
    page.run("document.querySelectorAll('.token')[4].dispatchEvent(new MouseEvent('mouseenter'))")
    page.screenshot(path)


def _compare(page: Browser, url: str, path: Path) -> None:
    _open(page, url, "compare")
    for name, value in (("temperature", "0.8"), ("max_tokens", "80"), ("seed", "7")):
        _fill(page, f"#side-a [data-field={name}]", value)
    page.run("document.querySelector('#copy-side').click()")
    _fill(page, "#question-text", QUESTION)
    page.run("document.querySelector('#ask-both').click()")
    page.wait_for("document.querySelector('#verdict').className === 'same'")
    page.screenshot(path)


def _engine(page: Browser, url: str, path: Path) -> None:
    """Take a picture of the engine at work: some streams have ended, others run."""
    _open(page, url, "engine")
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        for number in range(NUM_STREAMS):
            pool.submit(_complete, url, number)
        for condition in (f"=== {NUM_STREAMS}", f"<= {NUM_STREAMS // 2}"):
            page.wait_for(f"document.querySelectorAll('#requests .bar').length {condition}", timeout_s=LOAD_TIMEOUT_S)
        page.screenshot(path)


def _complete(url: str, number: int) -> None:
    prompt = [300 + (31 * number + 7 * index) % 20_000 for index in range(24 + 16 * (number % 5))]
    body = {"prompt": prompt, "max_tokens": STREAM_TOKENS // (1 + number % 4), "ignore_eos": True, "seed": number}
    httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()


def _side_by_side(page: Browser, pictures: list[Path], path: Path) -> None:
    """Let the browser draw two pictures side by side."""
    data = [base64.b64encode(picture.read_bytes()).decode() for picture in pictures]
    images = "".join(f'<img width="{WIDTH}" src="data:image/webp;base64,{one}">' for one in data)
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "both.html"
        document.write_text(f'<body style="margin: 0; display: flex; zoom: {SCALE}">{images}</body>')
        page.open(document.as_uri(), width=round(2 * WIDTH * SCALE), height=round(HEIGHT * SCALE))
        page.wait_for("document.images.length === 2 && [...document.images].every((image) => image.complete)")
        page.screenshot(path)


if __name__ == "__main__":
    main()
